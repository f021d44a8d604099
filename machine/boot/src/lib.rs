//! Kernel images, boot protocols and ACPI tables.
