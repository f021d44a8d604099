//! How guest code runs: chooses an engine, owns the vCPU loop.
