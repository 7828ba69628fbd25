//! Typed ids, so that a thread's id does not compile where a run's is due.

use std::fmt;
use std::hash::{Hash, Hasher};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident, $new:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub Uuid);

        impl $name {
            /// A new id.
            #[must_use]
            #[expect(clippy::new_without_default, reason = "a new id is never a default")]
            pub fn new() -> Self {
                Self($new)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl std::str::FromStr for $name {
            type Err = uuid::Error;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                text.parse().map(Self)
            }
        }
    };
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub String);

        impl $name {
            /// The id as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.to_owned())
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(text)
            }
        }
    };
}

uuid_id!(
    /// One accepted input carried to its end (uuid v7, so ids sort by creation).
    RunId, Uuid::now_v7()
);
uuid_id!(
    /// Names one Lease; random, so that it cannot be guessed or repeated.
    LeaseToken, Uuid::new_v4()
);
uuid_id!(
    /// One worker process, new at every start: a configured name is only a label.
    WorkerId, Uuid::new_v4()
);

text_id!(
    /// A thread's name on the wire; any non-empty string up to 255 bytes, unique per tenant.
    ThreadId
);
text_id!(
    /// Whose data it is; every query names it.
    Tenant
);
text_id!(
    /// Who owns a thread within its tenant.
    UserId
);
text_id!(
    /// A named group of workers; `default` where a node names none.
    PoolName
);
text_id!(
    /// The content hash of a graph: `c-…` where its nodes are code of one program, `d-…` where the
    /// manifest says everything and any worker can load it.
    GraphVersion
);

impl PoolName {
    /// The pool of a node that names none.
    #[must_use]
    pub fn default_pool() -> Self {
        Self("default".to_owned())
    }
}

impl GraphVersion {
    /// Whether only a program that has the code can run it.
    #[must_use]
    pub fn is_code(&self) -> bool {
        self.0.starts_with("c-")
    }
}

impl Tenant {
    /// The tenant of a caller whose credential names none.
    #[must_use]
    pub fn default_tenant() -> Self {
        Self("default".to_owned())
    }
}

/// A thread's row in the store; never leaves the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ThreadKey(pub i64);

/// One execution of one node inside a run; `seq` counts from 1, 0 is `__start__`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StepId {
    /// The run.
    pub run_id: RunId,
    /// The place inside the run.
    pub seq: i32,
}

impl fmt::Display for StepId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.run_id, self.seq)
    }
}

/// A message's id: a string or an integer on the wire, its JSON type kept.
///
/// `41` and `"41"` are the same id: one spelling finds what the other stored.
#[derive(Debug, Clone)]
pub struct MessageId {
    /// The id as text; for an integer its digits.
    pub text: String,
    /// Whether the wire shows a JSON number.
    pub is_int: bool,
}

impl MessageId {
    /// A new random id (uuid v4).
    #[must_use]
    pub fn random() -> Self {
        Self { text: Uuid::new_v4().to_string(), is_int: false }
    }
}

impl PartialEq for MessageId {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for MessageId {}

impl Hash for MessageId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.text.hash(state);
    }
}

impl From<&str> for MessageId {
    fn from(text: &str) -> Self {
        Self { text: text.to_owned(), is_int: false }
    }
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Serialize for MessageId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.is_int {
            let number: serde_json::Number = self.text.parse().map_err(serde::ser::Error::custom)?;
            number.serialize(serializer)
        } else {
            serializer.serialize_str(&self.text)
        }
    }
}

impl<'de> Deserialize<'de> for MessageId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match super::Json::deserialize(deserializer)? {
            super::Json::String(text) => Ok(Self { text, is_int: false }),
            super::Json::Number(number) if is_integer(&number) => Ok(Self { text: number.to_string(), is_int: true }),
            _ => Err(serde::de::Error::custom("a message id is a string or an integer")),
        }
    }
}

/// Whether a number was written without fraction and exponent.
#[must_use]
pub fn is_integer(number: &serde_json::Number) -> bool {
    !number.to_string().contains(['.', 'e', 'E'])
}

/// Whose rows a query may see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scope {
    /// Always named.
    pub tenant: Tenant,
    /// Only this owner's threads and runs; `None` where authentication is off.
    pub owner: Option<UserId>,
}

/// The verified caller of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The caller's tenant.
    pub tenant: Tenant,
    /// The caller's user id; `anonymous` where authentication is off.
    pub user: UserId,
    /// Whether authentication is on, so that owners are told apart.
    pub verified: bool,
}

impl Caller {
    /// The caller of a server without authentication.
    #[must_use]
    pub fn anonymous() -> Self {
        Self { tenant: Tenant::default_tenant(), user: UserId("anonymous".to_owned()), verified: false }
    }

    /// What the caller may see.
    #[must_use]
    pub fn scope(&self) -> Scope {
        Scope { tenant: self.tenant.clone(), owner: self.verified.then(|| self.user.clone()) }
    }
}
