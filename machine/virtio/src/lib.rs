//! Virtio devices over virtio-pci (modern).
