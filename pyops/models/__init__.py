"""Models on the ops of this library, and an engine that generates text. A file imports only files listed before it:

config_values         values of a JSON file, checked
rope state_space      rotary embedding and state-space layers as config.json describes them
parts                 norms, multipliers and names of a decoder
fields                which fields of these files were read, and which change nothing
family                how the config.json of a family is read
rope_families         dense decoders that differ in their rotary embedding
families              dense decoders by their parts
mixture latent        mixtures of experts and latent attention as config.json describes them
compressed            compressed attention and hyper-connections as config.json describes them
mixed_families        decoders with mixtures, latent attention or state-space layers
hybrid_families       decoders with attention and layers that keep states
packed_format         packed weights, and projections that are not quantized
quantization          the quantization of weights, as config.json describes it
kv_scheme             the dtype of a paged cache, as config.json describes it
gguf_families         GGUF files: the metadata of each architecture
gguf_header           the header of a GGUF file
gguf_keys             which keys of its metadata are read, and which change nothing
gguf_names            names of the tensors of a Hugging Face folder in a GGUF file
gguf_file             GGUF files: their tensors, and their metadata as an equivalent config.json
gguf_tokenizer        the tokenizer in a GGUF file
config                config.json
kv_cache              the dtype of a paged cache, and the scales of its fp8 values
packed_linear         projections with packed weights
gguf_linear           projections with weights in GGUF's quantized types
linear                projections: plain, 8-bit, packed, or in GGUF's quantized types
norm                  norms of rows and heads
batch                 the tokens of one forward pass
attention             attention over a paged cache; MLPs
expert_weights        weights of experts: plain, 8-bit, or dequantized at load time
marlin_experts        packed weights of experts in Marlin's layout
gguf_experts          weights of experts in GGUF's types
experts               mixtures of experts
indexer               the slots of the tokens that a token attends to, for sparse attention
latent_attention      attention over a paged latent KV cache
compressor            a window of tokens as one key
compressed_attention   attention over a window and compressed keys, in a paged cache
mamba                 state-space layers, with states in slots
hyper_connections     a residual of several streams
layers                a layer: attention or another mixer, an MLP or experts, norms
one_token             the layers of a decode step of one token, with fewer kernels
decoder               the model
tensor_parallel       the model divided among processes
kv_scales             scales of fp8 caches, from a checkpoint or a caller
checkpoint hooks      weights from a folder; functions that change logits before a token is chosen
params                SamplingParams
drawing               the choice of the next token, on the device
runner                the model with its cache and CUDA graphs
kernels scheduler     all kernels that serving a model launches; which requests run, with which blocks and slots
logprobs              hooks, `min_tokens` and log-probabilities of a step
steps                 the steps of an engine, launched before the tokens of the previous one are read
engine                continuous batching
calibration           scales of fp8 caches, from prompts
"""

from .calibration import calibrate_kv_scales
from .checkpoint import load
from .config import Config
from .decoder import Decoder
from .engine import Engine, Output, check_request
from .hooks import LogitsHook, Text, bias, min_p
from .kernels import serving_kernels
from .kv_scales import write_kv_scales
from .latent import Latent
from .logprobs import Logprobs
from .mixture import Mixture
from .packed_format import PackedQuantization
from .params import SamplingParams
from .parts import Multipliers, Names, Norms
from .quantization import Quantization
from .rope import Rope
from .state_space import StateSpace
from .tensor_parallel import Group, ParallelDecoder

__all__ = [
    "Config",
    "Decoder",
    "Engine",
    "Group",
    "Latent",
    "LogitsHook",
    "Logprobs",
    "Mixture",
    "Multipliers",
    "Names",
    "Norms",
    "Output",
    "PackedQuantization",
    "ParallelDecoder",
    "Quantization",
    "Rope",
    "SamplingParams",
    "StateSpace",
    "Text",
    "bias",
    "calibrate_kv_scales",
    "check_request",
    "load",
    "min_p",
    "serving_kernels",
    "write_kv_scales",
]
