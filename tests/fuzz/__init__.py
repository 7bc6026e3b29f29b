"""Random calls: one record from a seed (``drawn``), computed (``judged``) or launches to build."""
