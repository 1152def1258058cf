"""This module makes the batch benchmark's prompts: lines of ``serve-app batch run``, and Beam examples. Pure."""

import math
import random
from dataclasses import dataclass
from typing import Any

SEED = 0xBEA3
_WORDS = "time year people way day man thing woman life child world school state family student group country problem hand part"


@dataclass(frozen=True)
class Lengths:
    """A law of lengths in tokens: log-normal, right-skewed and cut off.

    The shape is an assumption, after the Public Pool of Prompts (arXiv 2202.01279): most prompts are a question of some dozen words, a few
    have a whole article, and answers are short. The data set itself is not used.
    """

    median_prompt: float = 96.0
    sigma_prompt: float = 0.8
    max_prompt: int = 1024
    median_answer: float = 24.0
    sigma_answer: float = 0.9
    max_answer: int = 256

    def divided(self, divisor: int) -> "Lengths":
        """Return the same law with all lengths divided by ``divisor``."""
        return Lengths(
            self.median_prompt / divisor,
            self.sigma_prompt,
            self.max_prompt // divisor,
            self.median_answer / divisor,
            self.sigma_answer,
            self.max_answer // divisor,
        )


def lines(num: int, lengths: Lengths) -> list[dict[str, Any]]:
    """Return seeded lines, the same on each call. Answers run to their ``max_tokens``.

    Each word of a prompt is one token of SmolLM2's tokenizer, so a prompt has as many tokens as words.
    """
    chance = random.Random(SEED)
    made = []
    for number in range(num):
        num_words = _draw(chance, lengths.median_prompt, lengths.sigma_prompt, lengths.max_prompt)
        max_tokens = _draw(chance, lengths.median_answer, lengths.sigma_answer, lengths.max_answer)
        prompt = " ".join(chance.choices(_WORDS.split(), k=num_words))
        parameters = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        made.append({"id": f"p{number}", "prompt": prompt, **parameters})
    return made


def sizes(line: dict[str, Any]) -> tuple[int, int]:
    """Return the number of tokens of a line's prompt and of its answer."""
    return len(line["prompt"].split()), int(line["max_tokens"])


def _draw(chance: random.Random, median: float, sigma: float, most: int) -> int:
    return min(most, max(1, round(chance.lognormvariate(math.log(median), sigma))))
