"""The numbers of the random stream, which every implementation of it has in common (`ops/stream.py`)."""

MASK = 0xFFFFFFFF
STEP = 0x9E3779B9  # 2**32 / golden ratio, odd: neighbouring counters land far apart
HEAD_STEP = 0x632BE5AB
QUERY_STEP = 0x85EBCA6B
COLUMN_SALT = 0xA511E9B3
MIX_1 = 0x7FEB352D
MIX_2 = 0x846CA68B
