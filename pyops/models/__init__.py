"""Models on the ops of this library, and an engine that generates text. A file imports only files listed before it:

config_values         values of a JSON file, checked
rope                  rotary embedding as config.json describes it
config                config.json
llama                 the decoder
checkpoint params     weights from a folder; SamplingParams and sampling
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
