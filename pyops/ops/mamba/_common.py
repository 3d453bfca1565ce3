"""What the ops of state-space models share."""

PAD_SLOT_ID = -1  # the slot of a sequence that is padding, unless a call says otherwise
MAX_STATES = 256  # of a channel
