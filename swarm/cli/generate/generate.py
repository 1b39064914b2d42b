"""``swarm generate``: one prompt, its answer streamed to stdout. ``swarm attach``: the answer to an earlier request."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.cli.generate.terminal import dim_prompt, format_figures, is_terminal, replace_controls
from swarm.cli.options import JoinOption, UrlOption, open_client

if TYPE_CHECKING:
    from swarm.client.blocking import BlockingStream, Client
    from swarm.client.request import Prompt, RequestOptions
    from swarm.client.results import Choice, Completion, Piece
    from swarm.params import Grammar
    from swarm.wire.messages import Timing


MaxTokensOption = Annotated[int, typer.Option("--max-tokens", help="Maximum number of tokens to generate.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 always takes the most likely token.")]
TopKOption = Annotated[int, typer.Option("--top-k", help="Sample from this many most likely tokens; 0: off.")]
TopPOption = Annotated[
    float, typer.Option("--top-p", help="Sample from the most likely tokens with this total probability; 1: off.")
]
MinPOption = Annotated[
    float,
    typer.Option("--min-p", help="Exclude tokens below this share of the most likely one's probability; 0: off."),
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", help="Same seed, same answer. Random if not given.", show_default=False)
]
PriorityOption = Annotated[
    str, typer.Option("--priority", help="high, normal, low or a number from -100 to 100: higher goes first.")
]
TenantOption = Annotated[
    str,
    typer.Option("--tenant", help="Account of the request: tenants get equal shares.", show_default=False),
]
DeadlineOption = Annotated[
    float | None,
    typer.Option("--deadline", help="The swarm cancels it after this many seconds, or if it can't finish in time."),
]
TimeoutOption = Annotated[
    float | None, typer.Option("--timeout", help="Stop waiting after this many seconds.", show_default=False)
]
SchemaOption = Annotated[
    Path | None,
    typer.Option("--json-schema", metavar="FILE", help="Answer in JSON by this schema; - reads it from stdin."),
]
RegexOption = Annotated[
    str | None, typer.Option("--regex", help="Regular expression that the whole answer must match.", show_default=False)
]
ChoiceOption = Annotated[
    list[str] | None, typer.Option("--choice", help="Text that the answer may be. May be repeated.")
]
GrammarOption = Annotated[
    Path | None,
    typer.Option("--grammar", metavar="FILE", help="A grammar in Lark's or llama.cpp's form; - reads it from stdin."),
]
SpeculationOption = Annotated[
    str | None,
    typer.Option(
        "--speculation",
        help="What may guess tokens ahead: auto, off, suffix or draft. It changes no token.",
        show_default="the broker's setting",
    ),
]
AdapterOption = Annotated[
    str, typer.Option("--adapter", metavar="NAME", help="LoRA adapter of the swarm to use.", show_default=False)
]
WholeJsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead of the text.")]


def generate(
    context: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; - reads it from stdin.", show_default=False)
    ] = None,
    *,
    url: UrlOption = None,
    join: JoinOption = None,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End the text before this string. May be repeated.")
    ] = None,
    json_schema: SchemaOption = None,
    regex: RegexOption = None,
    choice: ChoiceOption = None,
    grammar: GrammarOption = None,
    n: Annotated[int, typer.Option("--n", help="Number of answers, sampled independently.")] = 1,
    tokens: Annotated[
        str | None, typer.Option("--tokens", help="Token ids instead of a text, like 1,15043.", show_default=False)
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a message, by the model's chat template.")
    ] = False,
    hops: Annotated[
        bool, typer.Option("--hops", help="Show afterwards, on stderr, where the time of each token went.")
    ] = False,
    stats: Annotated[
        bool | None,
        typer.Option(
            "--stats/--no-stats",
            help="End with a line on stderr: tokens, tokens/s, time to the first token. [default: on a terminal]",
            show_default=False,
        ),
    ] = None,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach", help="Only print the request's id once it is accepted; swarm attach reads the answer."
        ),
    ] = False,
    priority: PriorityOption = "normal",
    tenant: TenantOption = "",
    deadline: DeadlineOption = None,
    timeout: TimeoutOption = None,
    speculation: SpeculationOption = None,
    adapter: AdapterOption = "",
    as_json: WholeJsonOption = False,
) -> None:
    """Generate text from a prompt.

    The answer is streamed to stdout, everything else goes to stderr. A terminal also shows the prompt before the
    answer. Ctrl-C cancels the request.
    """
    if detach and hops:
        raise typer.BadParameter("--hops shows where time went at the end of an answer, --detach does not wait for it")
    if prompt == "-" and "-" in (str(json_schema), str(grammar)):
        raise typer.BadParameter("stdin is the prompt, and can't be the grammar, too")
    source = _parse_prompt(prompt, tokens, chat)
    options: RequestOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or (),
        "grammar": parse_grammar(json_schema, regex, choice, grammar),
        "n": n,
        "hops": hops,
        "priority": parse_priority(priority),
        "tenant": tenant,
        "deadline_s": deadline,
        "adapter": adapter,
        "speculation": speculation,  # type: ignore[typeddict-item]  # the client library checks it
        "timeout": timeout,
    }
    if detach:
        with open_client(context, url, join) as client:
            _detach(client, source, chat, options, as_json=as_json)
        return
    with open_client(context, url, join) as client:
        stream = _stream(client, source, chat, options)  # raises errors about wrong options
        print_wait_reason(client)
        is_watched = is_terminal() and not as_json
        shown_prompt = dim_prompt(source, is_message=chat) if is_watched else ""
        completion = print_stream(stream, client, silent=as_json or n > 1, prompt=shown_prompt)
        print_rest(completion, client, as_json=as_json)
    if is_watched if stats is None else stats:
        print(format_figures(completion), file=sys.stderr)
    if hops and not as_json:
        from swarm.cli.generate.hops import print_hops

        print_hops(completion.choices)


def attach(
    context: typer.Context,
    request: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST", help="The request's id, as `swarm generate --detach` printed it.", show_default=False
        ),
    ],
    first: Annotated[
        int,
        typer.Option(
            "--from",
            metavar="N",
            min=0,
            help="First token to show, from 0. With --json, or for several answers, all are shown.",
        ),
    ] = 0,
    *,
    url: UrlOption = None,
    join: JoinOption = None,
    timeout: TimeoutOption = None,
    as_json: WholeJsonOption = False,
) -> None:
    """Read the answer to a request, from any client: while it is generated, or for as long as the broker keeps it.

    The answer goes to stdout, everything else to stderr. Ctrl-C ends the reading; a detached request continues.
    """
    with open_client(context, url, join) as client:
        stream = client.attach(request, first, timeout=timeout)  # raises errors about wrong options
        many = client.recall(request).params.n > 1
        completion = print_stream(stream, client, silent=as_json or many)
        print_rest(completion, client, as_json=as_json)


def _detach(client: Client, source: Prompt, chat: bool, options: RequestOptions, *, as_json: bool) -> None:
    """Submit a detached request; print the id for ``swarm attach``."""
    from swarm.cli.output import print_json

    if chat:
        request_id = client.submit_chat([{"role": "user", "content": source}], **options)
    else:
        request_id = client.submit(source, **options)
    if as_json:
        print_json({"request_id": request_id})
    else:
        print(request_id)


def parse_priority(text: str) -> int | str:
    """Parse a priority: a number, or a name that the client library checks."""
    try:
        return int(text)
    except ValueError:
        return text


def _parse_prompt(prompt: str | None, tokens: str | None, chat: bool) -> Prompt:
    if (prompt is None) == (tokens is None):
        raise typer.BadParameter("give either a prompt or --tokens")
    if tokens is not None:
        if chat:
            raise typer.BadParameter("--chat needs a text, not --tokens")
        try:
            return [int(token) for token in tokens.replace(",", " ").split()]
        except ValueError:
            raise typer.BadParameter(f"--tokens takes numbers like 1,15043, not {tokens!r}") from None
    return sys.stdin.read() if prompt == "-" else prompt or ""


def _stream(client: Client, source: Prompt, chat: bool, options: RequestOptions) -> BlockingStream:
    if chat:
        return client.stream_chat([{"role": "user", "content": source}], **options)
    return client.stream(source, **options)


def print_wait_reason(client: Client) -> None:
    """Print why the answer will be delayed, if the swarm accepts requests but does not serve yet."""
    description = client.describe()
    if description.state != "serving":
        reason = f", it waits for {description.waits_for}" if description.waits_for else f": {description.state}"
        print(f"swarm: not serving yet{reason}", file=sys.stderr, flush=True)


def print_text(text: str) -> None:
    """Write a model's text to stdout and flush."""
    if sys.stdout.isatty():
        text = replace_controls(text)
    _write(text)


def _write(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


def print_stream(stream: BlockingStream, client: Client, *, silent: bool, prompt: str = "") -> Completion:
    """Print ``prompt`` and a stream until its end. Without a tokenizer, print token ids in the format of --tokens."""
    shown = False
    has_text = True
    try:
        for piece in stream:
            if not silent:
                if not shown:
                    _write(prompt)
                    has_text = client.text_model() is not None
                print_text(piece.text if has_text else _format_id(piece, is_first=not shown))
                shown = True
    finally:
        if shown:
            print_text("\n")  # also before the line of an error
    completion = stream.completion
    assert completion is not None  # the stream ended without an error
    return completion


def _format_id(piece: Piece, *, is_first: bool) -> str:
    if piece.token is None:
        return ""
    return str(piece.token) if is_first else f",{piece.token}"


def print_rest(completion: Completion, client: Client, *, as_json: bool) -> None:
    """Print the parts of the answer that were not streamed."""
    from swarm.cli.output import print_json

    if as_json:
        print_json(completion_data(completion))
    elif len(completion.choices) > 1:
        has_text = client.text_model() is not None
        for choice in completion.choices:
            answer = choice.text if has_text else ",".join(map(str, choice.tokens))
            print_text(f"[{choice.index}] {answer}\n")


def completion_data(completion: Completion) -> dict[str, object]:
    """Return the object that ``--json`` prints."""
    import msgspec

    data: dict[str, object] = {
        "request_id": completion.request_id,
        **_choice_data(completion.choices[0]),
        "usage": {
            "num_prompt": completion.usage.num_prompt,
            "num_tokens": completion.usage.num_tokens,
            "num_cached": completion.usage.num_cached,
        },
        "timing": _timing_data(completion.timing),
        "seed": completion.seed,
    }
    if len(completion.choices) > 1:
        data["choices"] = [_choice_data(choice) for choice in completion.choices]
    hops = completion.hops
    if hops:
        data["hops"] = [
            [msgspec.structs.asdict(hop) | {"layers": [hop.layers.first, hop.layers.stop]} for hop in per_token]
            for per_token in hops
        ]
    return data


def _timing_data(timing: Timing) -> dict[str, float | None]:
    """Return the timing, with None for values that were lost in a restart of the broker. A first token after 0 s is
    impossible, so it marks them."""
    data: dict[str, float | None] = {name: getattr(timing, name) for name in timing.__struct_fields__}
    if timing.first_token_s == 0:
        data |= {name: data[name] or None for name in ("queued_s", "first_token_s")}
    return data


def _choice_data(choice: Choice) -> dict[str, object]:
    return {"text": choice.text, "tokens": list(choice.tokens), "finish_reason": choice.finish_reason}


def parse_grammar(
    schema: Path | None, regex: str | None, choices: list[str] | None, ebnf: Path | None
) -> Grammar | None:
    """Return the grammar that the options specify; the client checks its meaning. Raises ``BadParameter``."""
    from swarm.params import Grammar

    given = {
        "--json-schema": schema is not None,
        "--regex": regex is not None,
        "--choice": bool(choices),
        "--grammar": ebnf is not None,
    }
    names = [name for name, is_given in given.items() if is_given]
    if len(names) > 1:
        raise typer.BadParameter(f"give only one of {', '.join(names)}: an answer has one form")
    if schema is not None:
        return Grammar("json_schema", _read_file(schema, "--json-schema"))
    if regex is not None:
        return Grammar("regex", regex)
    if choices:
        return Grammar("choice", json.dumps(choices, ensure_ascii=False))
    return None if ebnf is None else Grammar("ebnf", _read_file(ebnf, "--grammar"))


def _read_file(path: Path, option: str) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{option} {path} can't be read: {error}") from None
