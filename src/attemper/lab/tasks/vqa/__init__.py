"""Questions about images: data in the layout of VQAv2, easy-vqa, made-up shapes; answers scored as VQAv2 does."""
