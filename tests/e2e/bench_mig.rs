//! `sublet bench run` on the MIG devices of a GPU, and on those that are created for it.
