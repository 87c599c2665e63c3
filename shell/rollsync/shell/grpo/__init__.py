"""Group-relative policy optimization of a Hugging Face causal language model, in plain torch.

`loss` has the arithmetic, `trainer` the model, its optimizer and their files.
"""

from rollsync.shell.grpo.loss import clipped_policy_loss, group_relative_advantages
from rollsync.shell.grpo.trainer import GrpoTrainer, StepMetrics, TrainingRow

__all__ = [
    "GrpoTrainer",
    "StepMetrics",
    "TrainingRow",
    "clipped_policy_loss",
    "group_relative_advantages",
]
