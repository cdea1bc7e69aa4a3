"""Every architecture × every recipe: what is measured, what came out, and how it is written down."""
