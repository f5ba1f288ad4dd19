"""Orders of the waiting queue, by name. Importing the package fills the registry."""

from rootlet.scheduler.policies import fairness, prefix
from rootlet.scheduler.policies.base import POLICIES, PolicyContext, SchedulePolicy

__all__ = ["POLICIES", "PolicyContext", "SchedulePolicy", "fairness", "prefix"]
