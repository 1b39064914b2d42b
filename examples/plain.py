"""A client without Swarm's library: pyzmq carries the messages, msgpack writes and reads them.
docs/reference/protocol.md has the rules that it keeps. It needs a running swarm: at $SWARM_URL, or at port 5700 of
this machine.

python examples/plain.py [TOKEN_ID ...]     # unless given, those of "Once upon a time" in the demo model
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Iterator

import msgpack
import zmq

URL = os.environ.get("SWARM_URL", "tcp://127.0.0.1:5700")
QUIET_S = 5.0  # after so much silence what is wanted is said again: an answer may have been lost
PATIENCE_S = 30.0  # a broker that died is back by then, or nobody starts it again
ACK_EVERY = 32  # tokens; the broker sends 256 ahead, and then waits
AGAIN = {"kind": "again"}  # no message: the connection is new, or too quiet, so say again what you want


class Broker:
    """A connection that libzmq renews by itself. Each time we greet, for it may be another broker that is there now."""

    def __init__(self, url: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.set(zmq.ROUTING_ID, secrets.token_bytes(16))  # by which it knows us again on a new connection
        self.socket.set(zmq.IMMEDIATE, 1)  # nothing is kept for a connection that is not there
        self.socket.set(zmq.SNDTIMEO, 1000)
        self.connected = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.connect(url)
        self.greeted, self.heard_at = False, time.monotonic()

    def say(self, kind: str, **fields: object) -> None:
        """Send a message. Without a connection it is dropped: all that is wanted will be said again."""
        if self.greeted or kind == "greet":
            try:
                self.socket.send(msgpack.packb({"v": 1, "kind": kind, **fields}))
            except zmq.Again:
                self.greeted = False

    def hear(self) -> dict:
        """The next message; what came in its second frame is its "data"."""
        ready = zmq.select([self.socket, self.connected], [], [], QUIET_S)[0]
        if self.connected in ready:
            self.connected.recv_multipart()
            self.greeted = False
            self.say("greet", versions=[1], schema="", build="plain.py")
        elif self.socket not in ready:
            if time.monotonic() > self.heard_at + PATIENCE_S:
                raise SystemExit(f"no broker answers at {URL}")
            self.say("describe")  # a broker that has nothing to tell of our request answers this
        if self.socket not in ready:
            return AGAIN
        self.heard_at = time.monotonic()
        header, *payload = self.socket.recv_multipart()
        message = msgpack.unpackb(header, strict_map_key=False)
        match message:
            case {"kind": "greet", "versions": versions}:
                if 1 not in versions:
                    raise SystemExit(f"the broker speaks protocol {versions}, and this client 1")
                self.greeted = True
                return AGAIN
            case {"kind": "malformed", "reason": reason}:
                raise SystemExit(f"the broker does not understand: {reason}")
        return message | {"data": b"".join(payload)}

    def ask(self, kind: str, wanted: dict, **fields: object) -> dict:
        """Ask until an answer comes that has these values."""
        message = AGAIN
        while not wanted.items() <= message.items():
            if message is AGAIN:
                self.say(kind, **fields)
            message = self.hear()
        return message

    def file(self, name: str) -> bytes:
        """A file of the model's tokenizer, part by part."""
        content, total = b"", 1
        while len(content) < total:
            wanted = {"kind": "asset_part", "name": name, "offset": len(content)}
            part = self.ask("get_asset", wanted, name=name, offset=len(content))
            content, total = content + part["data"], part["total"]
        return content

    def stream(self, request: dict) -> Iterator[int | dict]:
        """The tokens, in order and each once, whatever becomes of the connection; then the message of the end."""
        name, came, acked = request["request_id"], 0, 0  # "came": how many tokens
        wish, message = {"kind": "submit", **request}, AGAIN
        while True:
            if message is AGAIN:
                self.say(**wish)
            elif message.get("request_id") == name:
                is_gap = message.get("start", 0) > came or message.get("num_tokens", 0) > came
                if message["kind"] == "rejected":
                    raise SystemExit(f"{message['code']}: {message['reason']}")
                if message["kind"] == "tokens" and not is_gap:
                    new = message["ids"][came - message["start"] :]  # without what we have already
                    came += len(new)
                    yield from new
                is_over = message["kind"] == "finished" and not is_gap
                if is_over or came - acked >= ACK_EVERY:
                    self.say("ack", request_id=name, index=0, next_index=came)
                    acked = came
                if is_over:
                    yield message
                    return
                # It is accepted. From now on we want what comes behind the tokens that we have.
                wish = {"kind": "attach", "request_id": name, "next_index": [came], "again": True}
                if is_gap:
                    self.say(**wish)
            message = self.hear()


broker = Broker(URL)
about = broker.ask("describe", {"kind": "description"})
status = broker.ask("query", {"kind": "report", "what": "status"}, what="status")["body"]
if about["manifest"] is None:
    raise SystemExit(f"the swarm has no model yet: it waits for {about['waits_for']}")
print(f"model {about['manifest']['name']} of swarm {about['swarm_version']}: {about['max_context']} positions")
print(f"{status['state']}: {status['num_stages']} stages, {status['num_running']} sequences run")

words = {token: word for word, token in json.loads(broker.file("tokenizer.json"))["model"]["vocab"].items()}
prompt = [int(token) for token in sys.argv[1:]] or [0, 428, 431, 265, 430]
params = {"max_tokens": 60, "temperature": 0.8}
for token in broker.stream({"request_id": secrets.token_hex(16), "prompt": prompt, "params": params, "seed": 1}):
    if isinstance(token, int):  # true text takes a tokenizer's library
        print(words[token].replace("Ġ", " ").replace("Ċ", "\n"), end="", flush=True)
    else:
        print(f"\n{token['reason']}: {token['num_tokens']} tokens in {token['timing'][2]:.3f} s", token["detail"])
zmq.Context.instance().destroy(linger=1000)  # the last acknowledgement leaves
