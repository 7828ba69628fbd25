//! A whole stack in one process for the tests of this crate: a worker, and the store, queue and
//! events in memory.

mod graphs;
mod stories_events;
mod stories_fuzz;
mod stories_input;
mod stories_interrupts;
mod stories_runs;
mod stories_stream;
mod stories_threads;

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use http::{HeaderMap, Method, Request, StatusCode};
use serde_json::json;
use threadgate_shared::dispatcher::Dispatcher;
use threadgate_shared::domain::Json;
use threadgate_shared::domain::RunId;
use threadgate_shared::events::{End, Event, EventId, EventLog, Followed, MemoryEvents};
use threadgate_shared::graph::Graph;
use threadgate_shared::graph::registry::Registry;
use threadgate_shared::parts::Parts;
use threadgate_shared::queue::{JobQueue, MemoryQueue};
use threadgate_shared::store::memory::MemoryStore;
use threadgate_shared::store::{GraphRecord, Graphs};
use threadgate_worker::Worker;
use threadgate_worker::config::WorkerConfig;
use tokio::sync::broadcast::{Receiver, Sender};
use tokio_util::sync::{CancellationToken, DropGuard};
use tower::ServiceExt;

pub use graphs::{Gate, approval, ask, calling, endless, gated, linear, named};

use crate::{ApiConfig, App, router};

/// A stack that runs until it is dropped.
pub struct Stack {
    pub store: Arc<MemoryStore>,
    pub parts: Parts,
    pub app: App,
    router: Router,
    _stop: DropGuard,
}

/// What a request was answered with.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub bytes: Vec<u8>,
}

impl Stack {
    /// The graphs, the first of them served, with a worker that runs them.
    pub async fn start(graphs: Vec<Graph>) -> Self {
        Self::with_config(graphs, ApiConfig::default()).await
    }

    /// The same with other settings.
    pub async fn with_config(graphs: Vec<Graph>, config: ApiConfig) -> Self {
        Self::with_events(graphs, config, Arc::new(MemoryEvents::new())).await
    }

    /// The same with another event log.
    pub async fn with_events(graphs: Vec<Graph>, config: ApiConfig, events: Arc<dyn EventLog>) -> Self {
        let stack = Self::of(&graphs, config, events).await;
        let registry = graphs.into_iter().fold(Registry::new(), Registry::graph);
        let config = WorkerConfig { commit_linger: Duration::ZERO, ..WorkerConfig::default() };
        let worker = Worker::start(config, stack.parts.clone(), &registry).await.unwrap();
        tokio::spawn(worker.run(stack.app.draining.clone()));
        stack
    }

    /// The graphs without anybody who runs their nodes.
    pub async fn without_worker(graphs: Vec<Graph>, config: ApiConfig) -> Self {
        Self::of(&graphs, config, Arc::new(MemoryEvents::new())).await
    }

    async fn of(graphs: &[Graph], config: ApiConfig, events: Arc<dyn EventLog>) -> Self {
        let store = Arc::new(MemoryStore::new());
        let queue: Arc<dyn JobQueue> = Arc::new(MemoryQueue::new());
        let dispatcher = Dispatcher::new(Arc::clone(&store) as _, Arc::clone(&queue));
        let parts = Parts { store: Arc::clone(&store) as _, queue, dispatcher, events };
        for graph in graphs {
            let record = GraphRecord {
                name: graph.manifest.name.clone(),
                version: graph.version.clone(),
                manifest: (*graph.manifest).clone(),
                registered_at: chrono::Utc::now(),
            };
            store.register_graphs(&[record]).await.unwrap();
        }
        let served = graphs.first().map(|graph| graph.manifest.name.clone());
        let config = ApiConfig { graph: config.graph.clone().or(served), ..config };
        let stop = CancellationToken::new();
        let app = App::new(config, parts.clone(), stop.clone());
        Self { store, parts, router: router(&app), app, _stop: stop.drop_guard() }
    }

    /// Another server on the same store, whose event log has forgotten everything.
    pub fn with_new_events(&self) -> Self {
        let parts = Parts { events: Arc::new(MemoryEvents::new()), ..self.parts.clone() };
        let stop = CancellationToken::new();
        let app = App::new(self.app.config.clone(), parts.clone(), stop.clone());
        Self { store: Arc::clone(&self.store), parts, router: router(&app), app, _stop: stop.drop_guard() }
    }

    /// Sends a request as it is.
    pub async fn send(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (head, body) = response.into_parts();
        let bytes = tokio::time::timeout(Duration::from_secs(20), axum::body::to_bytes(body, usize::MAX));
        let bytes = bytes.await.expect("the answer ends").unwrap().to_vec();
        Answer { status: head.status, headers: head.headers, bytes }
    }

    /// The response before its body is read.
    pub async fn open(&self, request: Request<Body>) -> http::Response<Body> {
        self.router.clone().oneshot(request).await.unwrap()
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(get(path)).await
    }

    pub async fn post(&self, path: &str, body: &Json) -> Answer {
        self.send(with_json(Method::POST, path, body)).await
    }

    pub async fn put(&self, path: &str, body: &Json) -> Answer {
        self.send(with_json(Method::PUT, path, body)).await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.send(with_json(Method::DELETE, path, &json!({}))).await
    }

    /// Invokes the served graph with a text.
    pub async fn invoke(&self, thread: &str, text: &str) -> Answer {
        self.post("/v1/graph/invoke", &run_body(thread, text)).await
    }

    /// The state of a thread as `GET …/state` shows it.
    pub async fn state(&self, thread: &str) -> Json {
        self.get(&format!("/v1/threads/{thread}/state")).await.json()["data"]["state"].take()
    }

    /// Creates a run of `graph` in the background; its id.
    pub async fn create_run(&self, graph: &str, thread: &str, text: &str) -> String {
        let answer = self.post("/v1/runs", &new_run(graph, thread, text)).await;
        assert_eq!(answer.status, StatusCode::ACCEPTED, "{}", answer.text());
        answer.json()["run_id"].as_str().unwrap().to_owned()
    }
}

impl Answer {
    /// The body as JSON.
    pub fn json(&self) -> Json {
        serde_json::from_slice(&self.bytes).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    /// The lines of a stream.
    pub fn chunks(&self) -> Vec<Json> {
        self.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The status and the error's code.
    pub fn error(&self) -> (u16, String) {
        (self.status.as_u16(), self.json()["error"]["code"].as_str().unwrap_or_default().to_owned())
    }

    /// A header's text.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }
}

pub fn get(path: &str) -> Request<Body> {
    Request::get(path).body(Body::empty()).unwrap()
}

pub fn with_json(method: Method, path: &str, body: &Json) -> Request<Body> {
    let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
    request.body(Body::from(body.to_string())).unwrap()
}

/// A raw JSON body.
pub fn raw(path: &str, body: impl Into<Body>) -> Request<Body> {
    Request::post(path).header("content-type", "application/json").body(body.into()).unwrap()
}

pub fn user(text: &str) -> Json {
    json!({"role": "user", "content": [{"type": "text", "text": text}]})
}

pub fn run_body(thread: &str, text: &str) -> Json {
    json!({"messages": [user(text)], "config": {"thread_id": thread}})
}

pub fn new_run(graph: &str, thread: &str, text: &str) -> Json {
    json!({"graph": graph, "thread_id": thread, "input": {"messages": [user(text)]}})
}

/// The texts of a list of messages.
pub fn texts(messages: &Json) -> Vec<String> {
    let text = |message: &Json| message["content"][0]["text"].as_str().unwrap_or_default().to_owned();
    messages.as_array().into_iter().flatten().map(text).collect()
}

/// An event log that hears nothing and says nothing.
pub struct DeafEvents;

#[async_trait::async_trait]
impl EventLog for DeafEvents {
    async fn publish(&self, _: RunId, _: Vec<Event>) {}

    fn follow(&self, _: RunId, _: EventId) -> futures::stream::BoxStream<'static, Followed> {
        Box::pin(futures::stream::pending())
    }

    fn ends(&self) -> Receiver<End> {
        static SILENT: LazyLock<Sender<End>> = LazyLock::new(|| Sender::new(1));
        SILENT.subscribe()
    }

    fn is_healthy(&self) -> bool {
        false
    }
}
