"""Reports: one self-contained HTML page, its charts drawn here as SVG."""
