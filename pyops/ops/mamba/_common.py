"""Constants of the state-space ops."""

PAD_SLOT_ID = -1  # default slot of a padding sequence
MAX_STATES = 256  # most states (elements of the SSM state) of a channel
