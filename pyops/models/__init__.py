"""Models on the ops of this library, and text from them. A file imports only files above it, and of pyops the ops:

config                what config.json says
llama                 the decoder
checkpoint sampling   weights from a folder; the choice of a token
runner                the model with its cache and CUDA graphs
engine                requests, blocks, continuous batching
"""

from .checkpoint import load
from .config import Config, Rope
from .engine import Engine, Output
from .llama import Llama
from .sampling import SamplingParams

__all__ = ["Config", "Engine", "Llama", "Output", "Rope", "SamplingParams", "load"]
