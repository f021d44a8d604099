//! Loads made-up kernels and looks at what a guest would find.

mod acpi;
mod damaged;
mod images;
mod linux;
mod memory;
mod multiboot;
mod pvh;
mod refused;

host::choose!(host_linux::Linux);
