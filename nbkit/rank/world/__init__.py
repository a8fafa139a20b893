"""The world that a rank belongs to: joining and leaving it, its generations, how a stuck rank is broken out."""
