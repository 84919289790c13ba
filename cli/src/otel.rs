//! OpenTelemetry: sends the span of each request to a collector, over OTLP/HTTP as JSON.
//!
//! It follows the standard variables: `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT` (without one
//! nothing is sent), `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_TIMEOUT` (ms), `OTEL_BSP_SCHEDULE_DELAY` (ms),
//! `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES` and `OTEL_SDK_DISABLED`. A thread sends them in batches.
//! When more than [`QUEUE`] spans wait, new ones are dropped, so that no request waits for the collector. [`flush`] sends the last
//! batch when the program ends. A request whose `traceparent` is not sampled sends no span. Only `http://` endpoints work: run a
//! collector beside the server.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

/// Spans that wait to be sent.
const QUEUE: usize = 2048;

/// Spans in one message.
const BATCH: usize = 512;

/// The sender of this process's spans, for [`flush`], and how long that may take.
static ENDING: OnceLock<(SyncSender<Message>, Duration)> = OnceLock::new();

/// Sends the spans that wait, if this process sends any, and waits for at most the collector's timeout.
pub fn flush() {
    if let Some((spans, timeout)) = ENDING.get() {
        flush_through(spans, *timeout);
    }
}

fn flush_through(spans: &SyncSender<Message>, timeout: Duration) {
    let (done, sent) = sync_channel(1);
    // A full queue is one that the collector does not empty.
    if spans.try_send(Message::Flush(done)).is_ok() {
        let _ = sent.recv_timeout(timeout);
    }
}

/// What the thread that sends is given.
enum Message {
    /// A span that has ended.
    Span(Value),
    /// Everything before this goes out now; then the sender is told.
    Flush(SyncSender<()>),
}

/// What the fields of the span are called in a trace (the semantic conventions for generative models, where they have one).
const NAMES: [(&str, &str); 10] = [
    ("id", "gen_ai.request.id"),
    ("prompt_tokens", "gen_ai.usage.input_tokens"),
    ("generation_tokens", "gen_ai.usage.output_tokens"),
    ("cached_tokens", "gen_ai.usage.cache_read.input_tokens"),
    ("finish_reason", "gen_ai.response.finish_reasons"),
    ("queue_seconds", "gen_ai.latency.time_in_queue"),
    ("prefill_seconds", "gen_ai.latency.time_in_model_prefill"),
    ("decode_seconds", "gen_ai.latency.time_in_model_decode"),
    ("first_token_seconds", "gen_ai.latency.time_to_first_token"),
    ("total_seconds", "gen_ai.latency.e2e"),
];

/// Where spans go, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Exporter {
    /// `host:port`.
    address: String,
    /// Path of the request.
    path: String,
    /// Lines of its head.
    headers: Vec<(String, String)>,
    timeout: Duration,
    delay: Duration,
    /// Attributes of the resource.
    resource: Vec<(String, String)>,
}

impl Exporter {
    /// From the environment; `Ok(None)` where no endpoint is set or the SDK is disabled.
    pub fn from_env(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Exporter>, String> {
        let given = |name: &str| variable(name).filter(|value| !value.is_empty());
        if given("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        let base =
            || given("OTEL_EXPORTER_OTLP_ENDPOINT").map(|base| format!("{}/v1/traces", base.trim_end_matches('/')));
        let Some(endpoint) = given("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").or_else(base) else { return Ok(None) };
        let Some(rest) = endpoint.strip_prefix("http://") else {
            return Err(format!(
                "the OTLP endpoint is {endpoint:?}, expected http://HOST:PORT: run a collector beside the server"
            ));
        };
        let (host, path) = rest.split_once('/').unwrap_or((rest, "v1/traces"));
        let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let pairs = |name: &str| -> Vec<(String, String)> {
            let text = given(name).unwrap_or_default();
            let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
            pairs.map(|(name, value)| (name.trim().to_string(), value.trim().to_string())).collect()
        };
        let millis = |name: &str, default: u64| {
            Duration::from_millis(given(name).and_then(|value| value.parse().ok()).unwrap_or(default))
        };
        let mut resource = pairs("OTEL_RESOURCE_ATTRIBUTES");
        if let Some(name) = given("OTEL_SERVICE_NAME") {
            resource.retain(|(key, _)| key != "service.name");
            resource.push(("service.name".to_string(), name));
        } else if !resource.iter().any(|(key, _)| key == "service.name") {
            resource.push(("service.name".to_string(), "quire".to_string()));
        }
        let headers = pairs("OTEL_EXPORTER_OTLP_HEADERS");
        let fits = |text: &str| !text.contains(['\r', '\n']);
        if !headers.iter().all(|(name, value)| fits(name) && fits(value)) {
            return Err("OTEL_EXPORTER_OTLP_HEADERS holds a line break".to_string());
        }
        Ok(Some(Exporter {
            address: if has_port { host.to_string() } else { format!("{host}:4318") },
            path: format!("/{path}"),
            headers,
            timeout: millis("OTEL_EXPORTER_OTLP_TIMEOUT", 10_000),
            delay: millis("OTEL_BSP_SCHEDULE_DELAY", 5_000),
            resource,
        }))
    }

    /// Starts the thread that sends, for the whole process: [`flush`] ends it in order.
    pub fn start(self) -> io::Result<SpanLayer> {
        let timeout = self.timeout;
        let layer = self.start_thread()?;
        let _ = ENDING.set((layer.spans.clone(), timeout));
        Ok(layer)
    }

    fn start_thread(self) -> io::Result<SpanLayer> {
        let (sender, receiver) = sync_channel(QUEUE);
        std::thread::Builder::new().name("quire-otel".to_string()).spawn(move || self.run(&receiver))?;
        Ok(SpanLayer { spans: sender, ids: RandomState::new() })
    }

    fn run(&self, spans: &Receiver<Message>) {
        let mut batch = Vec::new();
        let mut due = None;
        loop {
            let next = match due {
                None => spans.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(due) => spans.recv_timeout(Instant::saturating_duration_since(&due, Instant::now())),
            };
            let (flushed, is_last) = match next {
                Ok(Message::Span(span)) => {
                    batch.push(span);
                    due = due.or_else(|| Instant::now().checked_add(self.delay));
                    if batch.len() < BATCH {
                        continue;
                    }
                    (None, false)
                }
                Ok(Message::Flush(done)) => (Some(done), false),
                Err(error) => (None, error == RecvTimeoutError::Disconnected),
            };
            self.send_all(std::mem::take(&mut batch));
            due = None;
            if let Some(done) = flushed {
                let _ = done.send(());
            }
            if is_last {
                return;
            }
        }
    }

    fn send_all(&self, batch: Vec<Value>) {
        let count = batch.len();
        if count > 0
            && let Err(error) = self.send(batch)
        {
            tracing::warn!("{count} spans were not taken by {}: {error}", self.address);
        }
    }

    fn send(&self, spans: Vec<Value>) -> io::Result<()> {
        let attributes: Vec<Value> = self.resource.iter().map(|(key, value)| attribute(key, &json!(value))).collect();
        let scope = json!({"scope": {"name": "quire", "version": env!("CARGO_PKG_VERSION")}, "spans": spans});
        let body =
            json!({"resourceSpans": [{"resource": {"attributes": attributes}, "scopeSpans": [scope]}]}).to_string();
        let address = self.address.to_socket_addrs()?.next();
        let address = address.ok_or_else(|| io::Error::other("the host has no address"))?;
        let mut stream = TcpStream::connect_timeout(&address, self.timeout)?;
        stream.set_read_timeout(Some(self.timeout))?;
        stream.set_write_timeout(Some(self.timeout))?;
        let mut head = format!("POST {} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n", self.path, self.address);
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += &format!("Content-Type: application/json\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes())?;
        stream.write_all(body.as_bytes())?;
        let mut status = [0; 12];
        stream.read_exact(&mut status)?;
        if status.starts_with(b"HTTP/1.1 2") || status.starts_with(b"HTTP/1.0 2") {
            return Ok(());
        }
        Err(io::Error::other(String::from_utf8_lossy(&status).into_owned()))
    }
}

/// Turns the spans of requests into those of OTLP.
pub struct SpanLayer {
    spans: SyncSender<Message>,
    ids: RandomState,
}

/// A span until it closes.
struct Open {
    began: SystemTime,
    fields: Fields,
}

#[derive(Default)]
struct Fields(HashMap<&'static str, Value>);

impl Visit for Fields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.insert(field.name(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name(), value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}").into());
    }
}

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for SpanLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        // Whoever began the trace has decided whether it is recorded.
        if !is_sampled(fields.0.get("traceparent")) {
            return;
        }
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(Open { began: SystemTime::now(), fields });
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(open) = span.extensions_mut().get_mut::<Open>()
        {
            values.record(&mut open.fields);
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        let Some(Open { began, fields }) = span.extensions_mut().remove::<Open>() else { return };
        // Full, or the thread is gone: a trace is worth less than a request.
        let _ = self.spans.try_send(Message::Span(self.finished(span.name(), began, &fields.0)));
    }
}

impl SpanLayer {
    fn finished(&self, name: &str, began: SystemTime, fields: &HashMap<&'static str, Value>) -> Value {
        let nanos = |time: SystemTime| time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos()).to_string();
        // 00-TRACE-PARENT-FLAGS, as the W3C has it; `call` has checked the form.
        let parent = fields.get("traceparent").and_then(Value::as_str).map(|text| text.split('-').collect::<Vec<_>>());
        let fresh = |salt: u8| format!("{:016x}", self.ids.hash_one((began, Instant::now(), salt)).max(1));
        let mut span = Map::new();
        let trace = parent.as_ref().map_or_else(|| fresh(0) + &fresh(1), |parts| parts[1].to_string());
        span.insert("traceId".to_string(), trace.into());
        span.insert("spanId".to_string(), fresh(2).into());
        if let Some(parts) = &parent {
            span.insert("parentSpanId".to_string(), parts[2].into());
        }
        span.insert("name".to_string(), name.into());
        span.insert("kind".to_string(), 2.into());
        span.insert("startTimeUnixNano".to_string(), nanos(began).into());
        span.insert("endTimeUnixNano".to_string(), nanos(SystemTime::now()).into());
        let attributes = NAMES.iter().filter_map(|(field, key)| Some(attribute(key, fields.get(field)?)));
        span.insert("attributes".to_string(), attributes.collect());
        let failed = fields.get("finish_reason").is_some_and(|reason| reason == "error");
        span.insert("status".to_string(), if failed { json!({"code": 2}) } else { json!({}) });
        Value::Object(span)
    }
}

/// Whether the parent, if there is one, is recorded: the last bit of its flags.
fn is_sampled(parent: Option<&Value>) -> bool {
    let flags = parent.and_then(Value::as_str).and_then(|text| text.rsplit('-').next());
    flags.is_none_or(|flags| u8::from_str_radix(flags, 16).is_ok_and(|flags| flags & 1 == 1))
}

fn attribute(key: &str, value: &Value) -> Value {
    let value = match value {
        Value::Number(number) if number.is_f64() => json!({"doubleValue": number}),
        Value::Number(number) => json!({"intValue": number.to_string()}),
        Value::String(text) => json!({"stringValue": text}),
        other => json!({"stringValue": other.to_string()}),
    };
    json!({"key": key, "value": value})
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::net::TcpListener;
    use tracing_subscriber::layer::SubscriberExt;

    fn exporter(pairs: &[(&str, &str)]) -> Result<Option<Exporter>, String> {
        Exporter::from_env(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_string()))
    }

    #[test]
    fn the_standard_variables_are_followed() {
        assert_eq!(exporter(&[]), Ok(None));
        let base = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318/");
        assert_eq!(exporter(&[base, ("OTEL_SDK_DISABLED", "true")]), Ok(None));
        let found = exporter(&[base, ("OTEL_EXPORTER_OTLP_HEADERS", "a=b, c=d=e")]).unwrap().unwrap();
        assert_eq!((&found.address[..], &found.path[..]), ("collector:4318", "/v1/traces"));
        assert_eq!(found.headers, [("a".into(), "b".into()), ("c".into(), "d=e".into())]);
        let own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://other/x");
        let found = exporter(&[base, own, ("OTEL_SERVICE_NAME", "mine")]).unwrap().unwrap();
        assert_eq!((&found.address[..], &found.path[..]), ("other:4318", "/x"));
        assert_eq!(found.resource, [("service.name".into(), "mine".into())]);
        assert!(exporter(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "https://far:443")]).is_err());
    }

    const TRACE: &str = "00-0123456789abcdef0123456789abcdef-0123456789abcdef";

    /// A collector, and a layer that sends to it after `delay` milliseconds.
    fn started(delay: &str) -> (TcpListener, SpanLayer) {
        let collector = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", collector.local_addr().unwrap());
        let variables = [("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()), ("OTEL_BSP_SCHEDULE_DELAY", delay)];
        let layer = exporter(&variables).unwrap().unwrap().start_thread().unwrap();
        (collector, layer)
    }

    /// The spans of the next message.
    fn received(collector: &TcpListener) -> Vec<Value> {
        let (mut stream, _) = collector.accept().unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let (mut line, mut length) = (String::new(), 0);
        reader.read_line(&mut line).unwrap();
        assert_eq!(line, "POST /v1/traces HTTP/1.1\r\n");
        while line != "\r\n" {
            line.clear();
            reader.read_line(&mut line).unwrap();
            length = line.strip_prefix("Content-Length: ").map_or(length, |text| text.trim().parse().unwrap());
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
        let message: Value = serde_json::from_slice(&body).unwrap();
        message["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().unwrap().clone()
    }

    #[test]
    fn a_flush_sends_what_waits_and_a_trace_that_is_not_sampled_sends_nothing() {
        let (collector, layer) = started("3600000");
        let spans = layer.spans.clone();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            for (id, flags) in [("dropped", "00"), ("kept", "01"), ("dropped too", "02"), ("kept too", "03")] {
                let parent = format!("{TRACE}-{flags}");
                drop(tracing::info_span!("request", id = id, traceparent = parent.as_str()));
            }
            drop(tracing::info_span!("request", id = "without a parent"));
        });
        let flushing = std::thread::spawn(move || flush_through(&spans, Duration::from_secs(60)));
        let found = received(&collector);
        flushing.join().unwrap();
        let ids: Vec<&Value> = found.iter().map(|span| &span["attributes"][0]["value"]["stringValue"]).collect();
        assert_eq!(ids, ["kept", "kept too", "without a parent"]);
    }

    #[test]
    fn a_span_arrives_at_a_collector_with_its_times_tokens_and_trace() {
        let (collector, layer) = started("1");
        let parent = format!("{TRACE}-01");
        let parent = parent.as_str();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            let empty = tracing::field::Empty;
            let span = tracing::info_span!(
                "request",
                id = "r1",
                traceparent = parent,
                prompt_tokens = 7u64,
                queue_seconds = empty
            );
            span.record("queue_seconds", 0.25);
        });
        let span = &received(&collector)[0];
        assert_eq!(
            (&span["traceId"], &span["parentSpanId"]),
            (&json!("0123456789abcdef0123456789abcdef"), &json!("0123456789abcdef"))
        );
        let attributes = span["attributes"].as_array().unwrap();
        for want in [
            json!({"key": "gen_ai.request.id", "value": {"stringValue": "r1"}}),
            json!({"key": "gen_ai.usage.input_tokens", "value": {"intValue": "7"}}),
            json!({"key": "gen_ai.latency.time_in_queue", "value": {"doubleValue": 0.25}}),
        ] {
            assert!(attributes.contains(&want), "{want} in {span}");
        }
        let time = |name: &str| span[name].as_str().unwrap().parse::<u128>().unwrap();
        assert!(0 < time("startTimeUnixNano") && time("startTimeUnixNano") <= time("endTimeUnixNano"));
    }
}
