"""PyTorch: the whole state of a training, its weights alone, and a loader that goes on where training was stopped."""

from powerguard.trainer.torch.data import ResumableLoader
from powerguard.trainer.torch.state import TorchState
from powerguard.trainer.torch.tree import load_weights

__all__ = ["ResumableLoader", "TorchState", "load_weights"]
