"""This module trains the tokenizer of the tiny checkpoints: byte-level BPE on the text below, the same on each run.

Every byte is a token of its own, so any text survives encoding and decoding. The chat template has the Hermes form,
which vLLM's ``hermes`` tool parser reads.
"""

from pathlib import Path

from serve_app.checkpoints.files import write_json
from serve_app.errors import CheckpointError

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
SPECIAL_TOKENS = (BOS, EOS, PAD, "<|im_start|>", "<|im_end|>")

# The tools go into the system turn; calls and results are JSON between tags. A tool's result is a turn of the user.
CHAT_TEMPLATE = """\
{%- set first_is_system = messages and messages[0]['role'] == 'system' -%}
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content if part['type'] == 'text' -%}{{ part['text'] }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools or first_is_system -%}
{{- '<|im_start|>system\\n' -}}
{%- if first_is_system -%}{{- text(messages[0]['content']) -}}{%- endif -%}
{%- if tools -%}
{{- '\\nYou may call these functions:\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\n</tools>\\nTo call one, answer\\n<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + text(message['content']) + '\\n</tool_response><|im_end|>\\n' -}}
{%- elif not (loop.first and first_is_system) -%}
{{- '<|im_start|>' + message['role'] + '\\n' + text(message['content']) -}}
{%- for call in message['tool_calls'] or [] -%}
{{- '\\n' if text(message['content']) or not loop.first -}}
{{- '<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) -}}
{{- '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

CORPUS = """\
A language model reads a sequence of tokens and predicts the next one. To serve it means to keep the weights in
memory, to
accept requests from many people at the same time, and to send each of them the answer token by token as it is made.
The
first pass over the prompt is called prefill; it computes the keys and values of every position and is limited by
arithmetic. Each later pass adds one token to every running request; this is decode, and it is limited by how fast the
weights and the cache can be read from memory. Because both kinds of work share the same accelerator, a scheduler
decides
in every step which requests run, which wait, and which must give their blocks back because the cache is full.

What is the capital of France? The capital of France is Paris. Who wrote the play? How many people live in the city?
Please
explain in one short sentence why the sky is blue, then write a poem about the sea, the mountains and an old
lighthouse.
Once upon a time there was a little girl who lived with her grandmother near a dark forest. Every morning she walked
down
to the river, filled two buckets with clear water, and carried them home before the sun stood high above the trees.
One day
she found a small grey stone that was warm in her hand, although snow was lying everywhere on the ground. "Keep me,"
said
the stone, "and I will answer three questions; but think well, for you cannot ask them again." She thought about it
for a
whole winter. Then she asked only one: "What should I do with the other two?" The stone laughed until it broke in
half.

You are a helpful assistant. Answer the question, and say so if you do not know. The user asked about the weather
tomorrow:
it will rain in the north, with strong wind from the west, and the temperature will reach 17 degrees in the afternoon.
Computers store numbers as bits: 0, 1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048 and 4096 are powers of two
or near
them. In the year 2024 about 1,500 engineers met for 3 days; 42 percent of them came from other countries. A train
leaves
the station at 9:15 and arrives at 11:45, so the journey takes two hours and thirty minutes at 100 km per hour.

def fibonacci(n: int) -> int:
    if n < 2:
        return n
    return fibonacci(n - 1) + fibonacci(n - 2)

for index, value in enumerate([1, 1, 2, 3, 5, 8, 13, 21]):
    assert fibonacci(index + 1) == value, f"wrong value at {index}"

{"name": "get_weather", "arguments": {"city": "Berlin", "unit": "celsius", "days": 3}}
{"type": "object", "properties": {"city": {"type": "string"}, "count": {"type": "integer"}}, "required": ["city"]}
{"id": 7, "items": [{"title": "red apple", "price": 1.25, "in_stock": true}, {"title": "pear", "price": null}], "ok":
false}

| month | rainfall | visitors |
|-------|----------|----------|
| January | 81 mm | 12,000 |
| February | 64 mm | 9,500 |
| March | 70 mm | 14,200 |

Grüße aus München, merci beaucoup, ¿dónde está la estación?, обычный текст, 日本語の文章, and 🙂 are text as well.
When a replica is lost, its requests continue elsewhere: the prompt and everything emitted so far are known at the
ingress,
so another engine can take over after the last token, and the reader sees nothing but a short pause. Health is
measured by
progress, not by promises. Nothing is thrown away without a reason, every queue has a limit, and each error tells
what to do.
History, science, music, kitchen recipes, gardening, mathematics, chemistry, football, philosophy and law are common
topics
of conversation; translation, summaries, classification, planning, rewriting and careful reasoning are common tasks.
First,
gather the facts. Second, compare the alternatives. Third, choose the simplest thing that could possibly work, and
test it.
"""


def write_tokenizer(directory: Path, *, vocab_size: int, max_tokens: int, with_template: bool, wrap: bool) -> None:
    """Train the tokenizer and write its files into ``directory``.

    Args:
        vocab_size: Number of tokens, bytes and special tokens included.
        max_tokens: Longest input of the model, in tokens.
        with_template: Whether the checkpoint can chat.
        wrap: Whether encoding puts BOS before and EOS after the text, as encoder models expect.
    Raises:
        CheckpointError: ``vocab_size`` is smaller than the alphabet or larger than the corpus can fill.
    """
    _trained(vocab_size, wrap=wrap).save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,  # true would drop the space before punctuation when decoding
            "model_max_length": max_tokens,
        },
    )
    if with_template:
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _trained(vocab_size: int, *, wrap: bool):  # type: ignore[no-untyped-def]  # tokenizers has no types
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    if (possible := tokenizer.get_vocab_size()) != vocab_size:
        raise CheckpointError(f"vocab_size {vocab_size}: the nearest that the built-in training text gives is {possible}")
    if wrap:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A {EOS}", pair=f"{BOS} $A {EOS} $B {EOS}", special_tokens=[(BOS, BOS_ID), (EOS, EOS_ID)]
        )
    return tokenizer
