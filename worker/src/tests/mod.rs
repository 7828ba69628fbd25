//! Stories of one worker on parts in memory.

mod path;
