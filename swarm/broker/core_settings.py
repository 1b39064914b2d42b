"""What the deciding code is told of the settings, each room its own part. ``settings`` makes it of the user's."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.broker.members.entry import MemberSettings
from swarm.broker.members.health import HealthSettings
from swarm.broker.members.recheck import RecheckSettings
from swarm.broker.recovery.procedure import PlanSettings
from swarm.broker.requests.requests import RequestSettings
from swarm.broker.state.prefix import PrefixRules
from swarm.broker.steps.scheduler import SchedulerSettings
from swarm.wire.messages import NOBODYS, Lineage


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """What the core needs to know; the endpoints are those that workers are told."""

    beat_endpoint: str
    data_endpoint: str
    version: str = "0"
    beat_interval_s: float = 0.1
    lease_s: float = 10.0
    prefix: PrefixRules = field(default_factory=PrefixRules)
    trace_steps: int = 4096
    profile_every: int = 0
    check_rules: bool = False
    lineage: Lineage = NOBODYS  # of this life
    key: str | None = None  # the broker's own, where doors go by keys
    dtype: str = ""  # of the weights, at all workers; empty: the first worker's
    relay: str = ""  # where steps are passed on to workers that can only connect outwards, if they are
    run: str = ""  # tells the ids of this broker's events from those of one before it
    requests: RequestSettings = field(default_factory=RequestSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    plan: PlanSettings = field(default_factory=PlanSettings)
    health: HealthSettings = field(default_factory=HealthSettings)
    recheck: RecheckSettings = field(default_factory=RecheckSettings)

    @property
    def member_settings(self) -> MemberSettings:
        return MemberSettings(
            self.beat_endpoint,
            self.data_endpoint,
            self.beat_interval_s,
            self.lease_s,
            self.health,
            self.recheck,
            self.key,
            self.dtype,
        )
