"""What FlashAttention-4 is told, so that it drops keys: tables, modifications of its scores, its operators in torch."""
