//! Boot tests with real guests.
