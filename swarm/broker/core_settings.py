"""Settings of the deciding code, by package. ``settings`` derives them from the user's settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.broker.members.admission import MemberSettings
from swarm.broker.members.health import HealthLimits
from swarm.broker.members.recheck import RecheckSettings
from swarm.broker.recovery.reconfiguration import ReconfigurationSettings
from swarm.broker.requests.requests import RequestSettings
from swarm.broker.state.prefix import PrefixRules
from swarm.broker.steps.scheduler import SchedulerSettings
from swarm.wire.messages import NO_LINEAGE, Lineage


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Settings of the core; the endpoints are sent to workers."""

    heartbeat_endpoint: str
    data_endpoint: str
    version: str = "0"
    beat_interval_s: float = 0.1
    lease_s: float = 10.0
    prefix: PrefixRules = field(default_factory=PrefixRules)
    trace_steps: int = 4096  # steps that the tracer keeps
    profile_every: int = 0  # steps between two ``profile`` log events; 0: none
    check_rules: bool = False  # check the state's rules at every tick, and log violations
    lineage: Lineage = NO_LINEAGE  # of this process
    key: str | None = None  # the broker's public key, where connections are authenticated by keys
    dtype: str = ""  # type of the weights at all workers; empty: the first worker's
    relay: str = ""  # endpoint of the relay for workers that can only connect outwards; empty: none
    run: str = ""  # prefix that distinguishes the ids of this broker's events from those of previous ones
    requests: RequestSettings = field(default_factory=RequestSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    plan: ReconfigurationSettings = field(default_factory=ReconfigurationSettings)
    health: HealthLimits = field(default_factory=HealthLimits)
    recheck: RecheckSettings = field(default_factory=RecheckSettings)

    @property
    def member_settings(self) -> MemberSettings:
        return MemberSettings(
            self.heartbeat_endpoint,
            self.data_endpoint,
            self.beat_interval_s,
            self.lease_s,
            self.health,
            self.recheck,
            self.key,
            self.dtype,
        )
