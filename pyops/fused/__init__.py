"""Functions that call ops of several families: mixtures of experts, and projections with quantized weights.

Models, layers and integrations share them. A file imports only files listed before it:

expert_products experts            the two grouped GEMMs of a mixture of experts; a whole mixture with its routing
marlin_experts parallel_experts    experts in Marlin's layout; expert parallelism
quantized_linear packed_linear     projections with 8-bit weights; with packed AWQ or GPTQ weights
"""
