"""A client's session and whoever calls it, wired to the simulated network.

Its process may stand still: what comes then waits in its connection, which holds only so much, and is heard at once
when it goes on. What came beyond that is lost, as the broker is told.
"""

from __future__ import annotations

from swarm.client import events as client_event
from swarm.client.session import Session
from swarm.errors import ClientError, Overloaded, Unavailable
from swarm.sim.actors.surroundings import Surroundings
from swarm.sim.network import Link
from swarm.wire.messages import Accepted, ClientMessage, Finished, ServerMessage, Submit, Tokens

RECONNECT_TIMEOUT_S = 45.0
KNOCK_S = (0.05, 0.5)  # between two attempts to connect
TICK_S = 0.5
AGAIN_S = 1.0  # before a caller tries again who never reached the broker
# Of the broker: a client that it has never answered asks for a sign of life after 2.5 s, and gives up after five.
LONG_SLEEP_S = 2.0
QUEUE = 8  # messages that a connection holds for one that does not read


class ClientNode:
    """A client's session and a caller that takes tokens at its own pace, and comes back when it is sent away for want
    of places. ``alive``: until its process dies, for good."""

    def __init__(self, cluster: Surroundings, name: str, consume_s: tuple[float, float]) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self.name = name
        self.session = Session(url="sim", reconnect_timeout_s=RECONNECT_TIMEOUT_S)
        self._consume_s = consume_s
        self._link: Link | None = None
        self._taken_at: dict[tuple[str, int], float] = {}  # when all that was delivered will have been taken
        self.stop_at: dict[tuple[str, int], int] = {}
        self._frozen_until: float | None = None
        self._held_back: list[client_event.Event] = []
        self.alive = True
        self._submits: dict[str, Submit] = {}
        self._unsaid: set[str] = set()  # requests that began without a connection
        self._answered: set[str] = set()  # … that the broker has answered
        self._connect()
        self._tick()

    @property
    def pace(self) -> tuple[float, float]:
        """How slowly its caller takes tokens."""
        return self._consume_s

    @property
    def peer(self) -> bytes:
        return self.name.encode()

    @property
    def has_room(self) -> bool:
        """Can its connection take one more message?"""
        return self._frozen_until is None or len(self._held_back) < QUEUE

    def freeze(self, for_s: float) -> None:
        """SIGSTOP, SIGCONT after a while."""
        until = max(self._world.now + for_s, self._frozen_until or 0.0)
        self._frozen_until = until
        self._world.at(for_s, lambda: self._thaw() if self._frozen_until == until else None)

    def die(self) -> None:
        """As by SIGKILL; nobody starts it again. What of its requests was detached belongs to whoever reads it."""
        self.alive = False
        audit = self._cluster.audit
        mine = set(self._submits)
        audit.orphans |= {r for r in mine & audit.promised if self._submits[r].detached} - audit.left
        audit.left |= mine - audit.orphans
        if self._link is not None:
            self._link.cut()
            self._link = None
            self._cluster.client_gone(self)

    def submit(self, submit: Submit) -> None:
        """Submit what it wants; nothing if it died meanwhile, or does not want it any more."""
        self._submits[submit.request_id] = submit
        if not self.alive:
            self._cluster.audit.left.add(submit.request_id)
        elif submit.request_id not in self._cluster.audit.left:
            self._unsaid.discard(submit.request_id)
            if self._link is None:
                self._unsaid.add(submit.request_id)
            self.feed(client_event.Start(submit))

    def _thaw(self) -> None:
        """Let it go on. What came meanwhile is there at once, before or behind the timer."""
        self._frozen_until = None
        held, self._held_back = self._held_back, []
        if self._world.random.random() < 0.5:
            held.insert(0, client_event.Tick())
        for event in held:
            self.feed(event)

    def feed(self, event: client_event.Event) -> None:
        if not self.alive:
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

    def hear(self, message: ServerMessage) -> None:
        if self._link is not None:
            self.feed(client_event.Received(message))

    def lose_connection(self, for_s: float) -> None:
        """Break the connection: what was on its way is lost, in both directions; then it comes back."""
        if self._link is None:
            return
        self._link.cut()
        self._link = None
        self._cluster.client_gone(self)
        self.feed(client_event.Disconnected())
        self._world.at(for_s, self._connect)

    def lose_broker(self) -> None:
        """Note that the broker died: nothing on the way arrives. The client looks for it until it is back."""
        if self._link is not None:
            self._link.break_off()
            self._link = None
            self.feed(client_event.Disconnected())
            self._world.at(self._world.draw(KNOCK_S), self._connect)

    def _connect(self) -> None:
        if not self.alive:
            return
        if self._frozen_until is not None:  # without a connection it is gone, to the broker, and may be for too long
            self._cluster.audit.may_fail.update(self.session.request_ids)
        broker = self._cluster.broker
        if not broker.lets_in("client") or broker.is_away or self._frozen_until is not None:  # nobody greets
            self._world.at(self._world.draw(KNOCK_S), self._connect)
            return
        self._link = self._cluster.network.link(self.name, "broker", "client", self._world.pace.control)
        self._cluster.client_back(self)
        self.feed(client_event.Connected())

    def _tick(self) -> None:
        if not self.alive:
            return
        if self._frozen_until is None:
            for action in self.session.handle(client_event.Tick(), self._world.now):
                self._perform(action)
        self._world.at(TICK_S, self._tick)

    def _perform(self, action: client_event.Action) -> None:
        self._world.tell(f"{self.name} ->", action)
        match action:
            case client_event.Send(message):
                self._send(message)
            case client_event.Deliver():
                self._delivered(action)
                self._take_soon(action)
            case client_event.Ended(request_id, index, finished):
                self._ended(request_id, index, finished)
            case client_event.Failed(request_id, error):
                self._failed(request_id, error)
            case _:
                pass

    def _delivered(self, action: client_event.Deliver) -> None:
        self._cluster.audit.delivered(action)

    def _ended(self, request_id: str, index: int, finished: Finished) -> None:
        self._cluster.audit.ended(request_id, index, finished)

    def _failed(self, request_id: str, error: ClientError) -> None:
        if self.was_not_answered(request_id, error):
            self._cluster.audit.left.add(request_id)  # its caller goes elsewhere
        submit = self._submits.get(request_id)
        again_s = self._comes_again_after(request_id, error)
        if again_s is None or submit is None or request_id in self._cluster.audit.left:
            self._cluster.audit.failed(request_id, error)
        else:
            self._world.at(again_s, lambda: self.submit(submit))

    def was_not_answered(self, request_id: str, error: ClientError) -> bool:
        """Whether it may fail, since the broker slept and said nothing of it."""
        slept = self._cluster.broker.longest_sleep_s > LONG_SLEEP_S
        return isinstance(error, Unavailable) and slept and request_id not in self._answered

    def _comes_again_after(self, request_id: str, error: ClientError) -> float | None:
        """If there was no place for it, or never a connection to say it on."""
        if isinstance(error, Overloaded):
            return error.retry_after_s
        is_unsaid = request_id in self._unsaid and request_id not in self._cluster.audit.promised
        return AGAIN_S if isinstance(error, Unavailable) and is_unsaid else None

    def _send(self, message: ClientMessage) -> None:
        if self._link is not None:
            life = self._cluster.broker.life
            self._link.carry(lambda: self._cluster.to_broker_from_client(self, message, life))

    def _take_soon(self, action: client_event.Deliver) -> None:
        """The caller takes what was delivered after a while, in order, and may find a stop string in it."""
        key = (action.request_id, action.index)
        upto = action.start + len(action.ids)

        def take() -> None:
            self.feed(client_event.Consumed(action.request_id, action.index, upto))
            stop_at = self.stop_at.get(key)
            if stop_at is not None and upto >= stop_at:
                self.feed(client_event.StopFound(action.request_id, action.index, stop_at))

        due = max(self._taken_at.get(key, 0.0), self._world.now + self._world.draw(self._consume_s))
        self._taken_at[key] = due
        self._world.at(due - self._world.now, take)
