"""Who computes what, and who sends what: pure functions and plain values."""

from torch_magi.plan.config import PlanConfig
from torch_magi.plan.cost import CostModel
from torch_magi.plan.hierarchy import hierarchical_comm_plan
from torch_magi.plan.planner import make_attn_plan
from torch_magi.plan.types import AttnPlan, CommPlan, StagePlan

__all__ = ["AttnPlan", "CommPlan", "CostModel", "PlanConfig", "StagePlan", "hierarchical_comm_plan", "make_attn_plan"]
