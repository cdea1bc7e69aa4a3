"""Audio: folders of sound files, ESC-50, ready spectrograms, and made-up tones."""
