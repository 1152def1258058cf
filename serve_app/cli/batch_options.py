"""These are the options of ``serve-app batch run``, each with its help."""

from pathlib import Path
from typing import Annotated, Literal

import typer

DEFAULT_URL = "http://127.0.0.1:8010"

Source = Annotated[
    str,
    typer.Argument(metavar="INPUT", help="JSONL, CSV, text or Parquet: a path, s3://, gs://, or another URL that fsspec opens."),
]
Output = Annotated[
    str,
    typer.Option(
        "--output",
        "-o",
        metavar="OUTPUT",
        help="Where the answers go, a path, s3:// or gs://: JSONL in the form of OpenAI's Batch API.",
    ),
]
Journal = Annotated[
    Path | None, typer.Option(help="File of this machine that holds the answers until the end. Default: OUTPUT.journal.")
]
Url = Annotated[str, typer.Option(help=f"The running service. Default: {DEFAULT_URL}.")]
Embedded = Annotated[
    Path | None,
    typer.Option(metavar="CONFIG", help="Start this fleet here for the batch, in place of a running service, and end it."),
]
Address = Annotated[
    str,
    typer.Option(help="With --embedded: the Ray cluster to start it on, of which this machine is a node; empty: start one here."),
]
Model = Annotated[str, typer.Option(help="Model of lines that name none. Default: the service's only model.")]
Chat = Annotated[bool, typer.Option("--chat/--no-chat", help="A prompt is a user's message, or text to continue.")]
System = Annotated[str, typer.Option(help="The system's message before each prompt of a chat.")]
PromptField = Annotated[str, typer.Option(help="The column or key that holds the prompt.")]
Parameter = Annotated[
    list[str] | None,
    typer.Option("--param", "-p", help="A field of each request, as NAME=VALUE: max_tokens=64, temperature=0."),
]
Schema = Annotated[Path | None, typer.Option(help="A JSON schema that each answer of a chat has to fit.")]
Priority = Annotated[
    Literal["normal", "background"],
    typer.Option(help="background: chats go before the lines in the engines of models with scheduling_policy: priority."),
]
Form = Annotated[str, typer.Option("--format", help="jsonl, csv, text or parquet. Default: by the name's suffix.")]
Concurrency = Annotated[int, typer.Option(min=1, max=4096, help="Most requests at once; fewer while the service is full.")]
Tries = Annotated[int, typer.Option(min=1, help="How often a request that the service fails is sent.")]
PatienceS = Annotated[float, typer.Option(min=1, help="Stop after so many seconds without any answer; a later run continues.")]
TokensPerMinute = Annotated[
    int | None, typer.Option("--max-tokens-per-minute", min=1, help="Most tokens a minute, of prompts and answers together.")
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the API key: its first line that is no comment or digest. Default: $SERVE_APP_API_KEY, or none."
    ),
]
RetryFailed = Annotated[bool, typer.Option(help="Ask again for lines that failed in an earlier run.")]
