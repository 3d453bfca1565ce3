"""Models on the ops of this library, and text from them. A file imports only files above it, and of pyops the ops:

values                what a JSON file holds, checked
rope                  the table of the rotary embedding
config                what config.json says
llama                 the decoder
memory                what a device has left
checkpoint sampling   weights from a folder; the choice of a token
runner                the model with its cache and CUDA graphs
engine                requests, blocks, continuous batching
"""

from .checkpoint import load
from .config import Config
from .engine import Engine, Output, check_request
from .llama import Llama
from .rope import Rope
from .sampling import SamplingParams

__all__ = ["Config", "Engine", "Llama", "Output", "Rope", "SamplingParams", "check_request", "load"]
