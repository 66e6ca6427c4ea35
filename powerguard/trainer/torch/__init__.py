"""PyTorch: the whole state of a training, and a loader that goes on where training was stopped."""

from powerguard.trainer.torch.data import ResumableLoader
from powerguard.trainer.torch.state import TorchState

__all__ = ["ResumableLoader", "TorchState"]
