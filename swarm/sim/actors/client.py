"""A client's session and its caller, connected to the simulated network.

The process may stand still. Messages that arrive meanwhile wait in its connection, which holds a bounded number, and
are received together when it continues. Messages beyond the bound are lost, and the broker is notified.
"""

from __future__ import annotations

from swarm.client import events as client_event
from swarm.client.session import Session
from swarm.errors import ClientError, InvalidRequest, Overloaded, Unavailable
from swarm.sim.actors.environment import Environment
from swarm.sim.network import SimLink
from swarm.wire.messages import Accepted, ClientMessage, Finished, ServerMessage, Submit, Tokens

RECONNECT_TIMEOUT_S = 45.0
CONNECT_RETRY_S = (0.05, 0.5)  # between two attempts to connect
TICK_S = 0.5
SUBMIT_RETRY_S = 1.0  # until a caller that never reached the broker tries again
# A client that the broker has never answered asks for a sign of life after 2.5 s, and gives up after five.
LONG_SLEEP_S = 2.0
QUEUE_SIZE = 8  # messages held by the connection of a client that does not read


class ClientNode:
    """Client session with a caller that takes tokens at its own pace, and retries when the broker has no room."""

    def __init__(self, cluster: Environment, name: str, consume_s: tuple[float, float]) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self.name = name
        self.session = Session(url="sim", reconnect_timeout_s=RECONNECT_TIMEOUT_S)
        self._consume_s = consume_s
        self._link: SimLink | None = None
        self._taken_at: dict[tuple[str, int], float] = {}  # when everything delivered will have been taken
        self.stop_at: dict[tuple[str, int], int] = {}  # token index at which a stop string is found
        self._frozen_until: float | None = None
        self._held_back: list[client_event.SessionEvent] = []
        self.is_alive = True  # until its process dies, which is final
        self._submits: dict[str, Submit] = {}
        self._unsent: set[str] = set()  # requests that began without a connection
        self._answered: set[str] = set()  # requests that the broker has answered
        self._connect()
        self._tick()

    @property
    def pace(self) -> tuple[float, float]:
        """Range of the time in which its caller takes tokens."""
        return self._consume_s

    @property
    def peer(self) -> bytes:
        return self.name.encode()

    @property
    def has_space(self) -> bool:
        """Whether its connection can take one more message."""
        return self._frozen_until is None or len(self._held_back) < QUEUE_SIZE

    def freeze(self, for_s: float) -> None:
        """Stop the process as by SIGSTOP, and continue it after ``for_s`` seconds."""
        until = max(self._world.now + for_s, self._frozen_until or 0.0)
        self._frozen_until = until
        self._world.schedule(for_s, lambda: self._thaw() if self._frozen_until == until else None)

    def die(self) -> None:
        """Kill the process as by SIGKILL, without a restart. Its detached requests belong to their later readers."""
        self.is_alive = False
        audit = self._cluster.audit
        mine = set(self._submits)
        audit.orphans |= {r for r in mine & audit.accepted if self._submits[r].detached} - audit.abandoned
        audit.abandoned |= mine - audit.orphans
        if self._link is not None:
            self._link.close()
            self._link = None
            self._cluster.on_client_gone(self)

    def submit(self, submit: Submit) -> None:
        """Submit a request, unless the client has died meanwhile or does not want it any more."""
        self._submits[submit.request_id] = submit
        if not self.is_alive:
            self._cluster.audit.abandoned.add(submit.request_id)
        elif submit.request_id not in self._cluster.audit.abandoned:
            self._unsent.discard(submit.request_id)
            if self._link is None:
                self._unsent.add(submit.request_id)
            self.feed(client_event.StartRequest(submit))

    def _thaw(self) -> None:
        """Continue. Messages that arrived meanwhile are handled now, before or after the timer."""
        self._frozen_until = None
        held, self._held_back = self._held_back, []
        if self._world.random.random() < 0.5:
            held.insert(0, client_event.SessionTick())
        for event in held:
            self.feed(event)

    def feed(self, event: client_event.SessionEvent) -> None:
        if not self.is_alive:
            return
        if self._frozen_until is not None:
            self._held_back.append(event)
            return
        match event:
            case client_event.Received(message=Accepted() | Tokens() | Finished() as message):
                self._answered.add(message.request_id)
        self._world.tell(self.name, event)
        for action in self.session.handle(event, self._world.now):
            self._perform(action)

    def receive(self, message: ServerMessage) -> None:
        if self._link is not None:
            self.feed(client_event.Received(message))

    def lose_connection(self, for_s: float) -> None:
        """Break the connection for a while. Messages in flight are lost in both directions."""
        if self._link is None:
            return
        self._link.close()
        self._link = None
        self._cluster.on_client_gone(self)
        self.feed(client_event.Disconnected())
        self._world.schedule(for_s, self._connect)

    def on_broker_gone(self) -> None:
        """Handle the broker's death: nothing in flight arrives. The client reconnects when the broker is back."""
        if self._link is not None:
            self._link.kill()
            self._link = None
            self.feed(client_event.Disconnected())
            self._world.schedule(self._world.draw(CONNECT_RETRY_S), self._connect)

    def _connect(self) -> None:
        if not self.is_alive:
            return
        # for the broker, a frozen client without a connection is gone, perhaps for too long
        if self._frozen_until is not None:
            self._cluster.audit.may_fail.update(self.session.request_ids)
        broker = self._cluster.broker
        if not broker.accepts_connections("client") or broker.is_away or self._frozen_until is not None:  # no greeting
            self._world.schedule(self._world.draw(CONNECT_RETRY_S), self._connect)
            return
        self._link = self._cluster.network.link(self.name, "broker", "client", self._world.pace.control)
        self._cluster.on_client_back(self)
        self.feed(client_event.Connected())

    def _tick(self) -> None:
        if not self.is_alive:
            return
        if self._frozen_until is None:
            for action in self.session.handle(client_event.SessionTick(), self._world.now):
                self._perform(action)
        self._world.schedule(TICK_S, self._tick)

    def _perform(self, action: client_event.SessionAction) -> None:
        self._world.tell(f"{self.name} ->", action)
        match action:
            case client_event.Send(message):
                self._send(message)
            case client_event.Deliver():
                self._on_delivered(action)
                self._consume_later(action)
            case client_event.EndContinuation(request_id, index, finished):
                self._on_ended(request_id, index, finished)
            case client_event.FailRequest(request_id, error):
                self._on_failed(request_id, error)
            case _:
                pass

    def _on_delivered(self, action: client_event.Deliver) -> None:
        self._cluster.audit.on_delivered(action)

    def _on_ended(self, request_id: str, index: int, finished: Finished) -> None:
        self._cluster.audit.on_ended(request_id, index, finished)

    def _on_failed(self, request_id: str, error: ClientError) -> None:
        if self.may_be_unanswered(request_id, error):
            self._cluster.audit.abandoned.add(request_id)  # its caller uses another server
        submit = self._submits.get(request_id)
        retry_after_s = self._retry_after_s(request_id, error)
        if retry_after_s is None or submit is None or request_id in self._cluster.audit.abandoned:
            self._cluster.audit.on_failed(request_id, error)
            if isinstance(error, InvalidRequest):  # its caller is gone, and a second submission may still be on its way
                self._cluster.audit.abandoned.add(request_id)
        else:
            self._world.schedule(retry_after_s, lambda: self.submit(submit))

    def may_be_unanswered(self, request_id: str, error: ClientError) -> bool:
        """Whether the request may fail because the broker stood still without ever having answered it."""
        slept = self._cluster.broker.longest_pause_s > LONG_SLEEP_S
        return isinstance(error, Unavailable) and slept and request_id not in self._answered

    def _retry_after_s(self, request_id: str, error: ClientError) -> float | None:
        """Return the delay until the caller retries, if the broker had no room or the request was never sent. None:
        never."""
        if isinstance(error, Overloaded):
            return error.retry_after_s
        is_unsaid = request_id in self._unsent and request_id not in self._cluster.audit.accepted
        return SUBMIT_RETRY_S if isinstance(error, Unavailable) and is_unsaid else None

    def _send(self, message: ClientMessage) -> None:
        if self._link is not None:
            life = self._cluster.broker.life
            self._link.send(lambda: self._cluster.send_from_client(self, message, life))

    def _consume_later(self, action: client_event.Deliver) -> None:
        """Have the caller take the delivered tokens after a while, in order; it may find a stop string in them."""
        key = (action.request_id, action.index)
        upto = action.start + len(action.ids)

        def take() -> None:
            self.feed(client_event.Consumed(action.request_id, action.index, upto))
            stop_at = self.stop_at.get(key)
            if stop_at is not None and upto >= stop_at:
                self.feed(client_event.StopFound(action.request_id, action.index, stop_at))

        due = max(self._taken_at.get(key, 0.0), self._world.now + self._world.draw(self._consume_s))
        self._taken_at[key] = due
        self._world.schedule(due - self._world.now, take)
