"""Functions that call ops of several families: the experts of a layer, and projections of quantized weights.

The ops know none of them; models, layers and integrations share them. A file imports only files listed before it:

expert_products experts            the two grouped GEMMs of a mixture of experts; all of it, from routing to the sum
marlin_experts parallel_experts    experts in Marlin's layout; expert parallelism
quantized_linear packed_linear     projections of 8-bit weights; those of AWQ's and GPTQ's packed weights
"""
