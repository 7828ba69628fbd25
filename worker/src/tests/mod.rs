//! Stories of workers on parts in memory.

mod deadlines;
mod drain;
mod faults;
mod hostile;
mod leases;
mod outputs;
mod path;
mod queue;
mod retries;
mod stop;
mod tools;
