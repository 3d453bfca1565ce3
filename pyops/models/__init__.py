"""Models on the ops of this library, and text from them. A file imports only files above it, and of pyops the ops:

config_values         what a JSON file holds, checked
rope                  the table of the rotary embedding
config                what config.json says
llama                 the decoder
memory                what a device has left
checkpoint params     weights from a folder; how tokens are chosen
runner                the model with its cache and CUDA graphs
kernels               what serving a model launches
engine                requests, blocks, continuous batching
"""

from .checkpoint import load
from .config import Config
from .engine import Engine, Output, check_request
from .kernels import serving_kernels
from .llama import Llama
from .params import SamplingParams
from .rope import Rope

__all__ = ["Config", "Engine", "Llama", "Output", "Rope", "SamplingParams", "check_request", "load", "serving_kernels"]
