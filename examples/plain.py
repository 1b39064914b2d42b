"""Reference client of the protocol without Swarm's library: pyzmq transports the messages, msgpack encodes them.
docs/reference/protocol.md specifies the protocol. The client needs a running swarm at $SWARM_URL, by default at port
5700 of this machine.

python examples/plain.py [TOKEN_ID ...]     # default: the tokens of "Once upon a time" in the demo model
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
RESEND_S = 5.0  # after this time without a message the request is sent again: request or answer may have been lost
TIMEOUT_S = 30.0  # without any message; a broker that crashed has usually been restarted by then
ACK_EVERY = 32  # tokens; the broker sends at most 256 unacknowledged tokens
RESEND = {"kind": "resend"}  # not a protocol message: the connection is new or silent, so send the request again


class Broker:
    """Connection to the broker. libzmq reconnects by itself; after each reconnect the client sends a new greeting,
    because the broker may have been restarted with another version."""

    def __init__(self, url: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.set(zmq.ROUTING_ID, secrets.token_bytes(16))  # identifies this client across reconnects
        self.socket.set(zmq.IMMEDIATE, 1)  # no queue while there is no connection
        self.socket.set(zmq.SNDTIMEO, 1000)
        self.connected = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.connect(url)
        self.is_greeted, self.received_at = False, time.monotonic()

    def send(self, kind: str, **fields: object) -> None:
        """Send a message. Without a connection it is dropped; after the reconnect the caller repeats its request."""
        if self.is_greeted or kind == "greet":
            try:
                self.socket.send(msgpack.packb({"v": 1, "kind": kind, **fields}))
            except zmq.Again:
                self.is_greeted = False

    def receive(self) -> dict:
        """Return the next message, with its second frame as "data"; RESEND if the request must be sent again."""
        ready = zmq.select([self.socket, self.connected], [], [], RESEND_S)[0]
        if self.connected in ready:
            self.connected.recv_multipart()
            self.is_greeted = False
            self.send("greet", versions=[1], schema="", build="plain.py")
        elif self.socket not in ready:
            if time.monotonic() > self.received_at + TIMEOUT_S:
                raise SystemExit(f"no broker answers at {URL}")
            self.send("describe")  # a running broker always answers this, even if it has no news of the request
        if self.socket not in ready:
            return RESEND
        self.received_at = time.monotonic()
        header, *payload = self.socket.recv_multipart()
        message = msgpack.unpackb(header, strict_map_key=False)
        match message:
            case {"kind": "greet", "versions": versions}:
                if 1 not in versions:
                    raise SystemExit(f"the broker supports protocol versions {versions}, this client only version 1")
                self.is_greeted = True
                return RESEND
            case {"kind": "malformed", "reason": reason}:
                raise SystemExit(f"the broker rejected a message: {reason}")
        return message | {"data": b"".join(payload)}

    def request(self, kind: str, expected: dict, **fields: object) -> dict:
        """Send a request, repeatedly if necessary, until a reply with the expected values arrives."""
        message = RESEND
        while not expected.items() <= message.items():
            if message is RESEND:
                self.send(kind, **fields)
            message = self.receive()
        return message

    def get_file(self, name: str) -> bytes:
        """Fetch a file of the model's tokenizer, part by part."""
        content, total = b"", 1
        while len(content) < total:
            expected = {"kind": "asset_part", "name": name, "offset": len(content)}
            part = self.request("get_asset", expected, name=name, offset=len(content))
            content, total = content + part["data"], part["total"]
        return content

    def stream(self, request: dict) -> Iterator[int | dict]:
        """Yield each token exactly once, in order, even across reconnects; then the "finished" message."""
        request_id, num_received, num_acked = request["request_id"], 0, 0
        to_send, message = {"kind": "submit", **request}, RESEND
        while True:
            if message is RESEND:
                self.send(**to_send)
            elif message.get("request_id") == request_id:
                is_gap = message.get("start", 0) > num_received or message.get("num_tokens", 0) > num_received
                if message["kind"] == "rejected":
                    raise SystemExit(f"{message['code']}: {message['reason']}")
                if message["kind"] == "tokens" and not is_gap:
                    new = message["ids"][num_received - message["start"] :]  # skip the tokens received before
                    num_received += len(new)
                    yield from new
                is_finished = message["kind"] == "finished" and not is_gap
                if is_finished or num_received - num_acked >= ACK_EVERY:
                    self.send("ack", request_id=request_id, index=0, next_index=num_received)
                    num_acked = num_received
                if is_finished:
                    yield message
                    return
                # The broker has accepted the request. After a reconnect, ask only for the tokens not yet received.
                to_send = {"kind": "attach", "request_id": request_id, "next_index": [num_received], "again": True}
                if is_gap:
                    self.send(**to_send)
            message = self.receive()


broker = Broker(URL)
about = broker.request("describe", {"kind": "description"})
status = broker.request("query", {"kind": "report", "what": "status"}, what="status")["body"]
if about["manifest"] is None:
    raise SystemExit(f"the swarm has no model yet: it waits for {about['waits_for']}")
print(f"model {about['manifest']['name']} of swarm {about['swarm_version']}: {about['max_context']} positions")
print(f"{status['state']}: {status['num_stages']} stages, {status['num_running']} sequences run")

words = {token: word for word, token in json.loads(broker.get_file("tokenizer.json"))["model"]["vocab"].items()}
prompt = [int(token) for token in sys.argv[1:]] or [0, 428, 431, 265, 430]
params = {"max_tokens": 60, "temperature": 0.8}
for token in broker.stream({"request_id": secrets.token_hex(16), "prompt": prompt, "params": params, "seed": 1}):
    if isinstance(token, int):  # exact text would need a tokenizer library
        print(words[token].replace("Ġ", " ").replace("Ċ", "\n"), end="", flush=True)
    else:
        print(f"\n{token['reason']}: {token['num_tokens']} tokens in {token['timing'][2]:.3f} s", token["detail"])
zmq.Context.instance().destroy(linger=1000)  # wait until the last acknowledgement is sent
