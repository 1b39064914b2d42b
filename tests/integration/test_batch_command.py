"""``swarm batch`` against a gateway with a real swarm behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.cli.app import app
from swarm.cli.output import run_app
from tests.faults.zygote import Zygote
from tests.integration.gateway import MODEL, Served, request

pytest.importorskip("fastapi", reason="the gateway's packages are not installed")

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def gateway(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    logs = tmp_path_factory.mktemp("logs")
    with Served(logs, zygote, {"SWARM_STATE_DIR": str(logs / "state")}) as served:
        yield served.url


def write(path: Path, num: int, **fields: Any) -> Path:
    with path.open("w") as file:
        for number in range(num):
            question = [{"role": "user", "content": f"Who lives in house {number}?"}]
            body = {"model": MODEL, "messages": question, "max_tokens": 12, "seed": number, **fields}
            file.write(json.dumps({"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body}) + "\n")
    return path


def command(*words: str) -> int:
    return run_app(lambda: app, "swarm", ["batch", *words])


def test_a_file_is_answered_and_not_run_twice(gateway: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each answer is that of the request alone. The same file follows the same batch; ``--new`` makes another one."""
    source, output = write(tmp_path / "in.jsonl", 20), tmp_path / "out.jsonl"
    words = ("run", str(source), "--output", str(output), "--gateway", gateway, "--json")
    assert command(*words) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["status"], first["files"]) == ("completed", [str(output)])
    for number, line in enumerate(output.read_text().splitlines()):
        body = {**json.loads(source.read_text().splitlines()[number])["body"]}
        code, _, content = request(gateway + CHAT, body)
        assert code == 200
        answer = json.loads(line)
        assert answer["custom_id"] == f"c{number}"
        assert answer["response"]["body"]["choices"] == json.loads(content)["choices"]
    output.unlink()
    assert command(*words) == 0
    assert json.loads(capsys.readouterr().out)["id"] == first["id"]
    assert len(output.read_text().splitlines()) == 20
    assert command(*words, "--new") == 0
    assert json.loads(capsys.readouterr().out)["id"] != first["id"]


def test_errors_have_a_file_of_their_own(gateway: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", 2, model="other")
    assert command("run", str(source), "--gateway", gateway) == 1
    errors = tmp_path / "in.jsonl.answers.jsonl.errors"
    assert str(errors) in capsys.readouterr().out
    codes = [json.loads(line)["response"]["status_code"] for line in errors.read_text().splitlines()]
    assert codes == [404, 404]


def test_wrong_lines_are_named(gateway: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", 2, stream=True)
    assert command("run", str(source), "--gateway", gateway) == 1
    shown = capsys.readouterr()
    assert "line 2: stream is not supported" in shown.out
    assert "the batch was not accepted" in shown.err
    source.write_text("nonsense\n")
    assert command("run", str(source), "--gateway", gateway) == 2
    assert "line 1" in capsys.readouterr().err


def test_batches_are_listed_shown_and_cancelled(
    gateway: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = write(tmp_path / "in.jsonl", 200, max_tokens=400, ignore_eos=True).read_bytes()
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + content
    form += b'\r\n--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--'
    code, _, answer = request(gateway + "/v1/files", form, [("content-type", "multipart/form-data; boundary=x")])
    assert code == 200, answer
    body = {"input_file_id": json.loads(answer)["id"], "endpoint": CHAT, "completion_window": "24h"}
    batch = json.loads(request(gateway + "/v1/batches", body)[2])["id"]
    assert command("list", "--gateway", gateway) == 0
    assert batch in capsys.readouterr().out
    assert command("cancel", batch, "--gateway", gateway) == 0
    assert f"{batch} cancel" in capsys.readouterr().out
    assert command("show", batch, "--gateway", gateway, "--json") == 0
    assert json.loads(capsys.readouterr().out)["status"] in ("cancelling", "cancelled")
    assert command("cancel", "batch_none", "--gateway", gateway) == 1
    assert "there is no batch" in capsys.readouterr().err
