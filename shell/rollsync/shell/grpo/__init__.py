"""Group-relative policy optimization of a Hugging Face causal language model, in plain torch.

`loss` has the arithmetic, `trainer` the model, its optimizer and their files. `worker` makes an
actor of the trainer, `replicas` adds up what several of those have, and `client` is all of them as
the one trainer that a controller sees.
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
