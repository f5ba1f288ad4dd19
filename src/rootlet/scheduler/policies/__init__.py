"""Orders of the waiting queue, by name. Importing the package fills the registry."""

from rootlet.scheduler.policies import fairness, prefix
from rootlet.scheduler.policies.base import LEAVES, POLICIES, PolicyContext, SchedulePolicy, leave_nothing

__all__ = ["LEAVES", "POLICIES", "PolicyContext", "SchedulePolicy", "fairness", "leave_nothing", "prefix"]
