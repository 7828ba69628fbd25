//! Documents that are right and documents that are wrong.
