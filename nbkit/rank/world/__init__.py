"""The world that a rank belongs to: joining and leaving it, its generations, and releasing a stuck rank."""
