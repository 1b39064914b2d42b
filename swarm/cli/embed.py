"""``swarm embed``: the embeddings of texts, as JSON."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.cli.generate.generate import DeadlineOption, PriorityOption, TenantOption, TimeoutOption, parse_priority
from swarm.cli.options import JoinOption, UrlOption, open_client

if TYPE_CHECKING:
    from swarm.client.results import Embedding

TextsArgument = Annotated[
    list[str], typer.Argument(metavar="TEXT…", help="Texts to embed; - reads one from each line of stdin.")
]
DimensionsOption = Annotated[
    int | None, typer.Option("--dimensions", help="Keep only this many numbers.", show_default="all")
]
TruncateOption = Annotated[
    int | None,
    typer.Option("--truncate", help="Keep at most this many tokens of a text.", show_default="refuse what is too long"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object with the token counts, too.")]


def embed(
    context: typer.Context,
    texts: TextsArgument,
    *,
    url: UrlOption = None,
    join: JoinOption = None,
    dimensions: DimensionsOption = None,
    truncate: TruncateOption = None,
    priority: PriorityOption = "normal",
    tenant: TenantOption = "",
    deadline: DeadlineOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the embedding of each text as a line of JSON: an array of numbers.

    The model's folder decides how the outputs of its tokens are pooled; without settings, the last token's counts,
    scaled to length 1.
    """
    if texts == ["-"]:
        texts = [line.rstrip("\n") for line in sys.stdin]
    with open_client(context, url, join) as client:
        embeddings = client.embed(
            texts,
            dimensions=dimensions,
            truncate=truncate,
            priority=parse_priority(priority),
            tenant=tenant,
            deadline_s=deadline,
            timeout=timeout,
        )
    _print(embeddings, as_json=as_json)


def _print(embeddings: list[Embedding], *, as_json: bool) -> None:
    import msgspec

    from swarm.cli.output import print_json

    if as_json:
        rows = [
            {"index": index, "tokens": each.num_prompt, "embedding": list(each.vector)}
            for index, each in enumerate(embeddings)
        ]
        print_json({"embeddings": rows})
        return
    for each in embeddings:
        print(msgspec.json.encode(list(each.vector)).decode())
