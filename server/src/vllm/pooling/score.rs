//! `POST /score` and `POST /rerank`: scores of pairs of texts.
//!
//! A model with one label scores the prompt of a pair. A model of embeddings scores the cosine of two embeddings, and computes the
//! embedding of each text once.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use engine::{GenerationRequest, Task};
use serde::Serialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::http::{ApiError, json};
use crate::reply::{Envelope, Run, prompt_usage, response_id};
use crate::request::pooled::{Pooled, finish, texts};
use crate::request::{Cost, Fields, Input, Work, body, unsupported};

/// The fields that both routes share.
struct Common {
    pooled: Pooled,
    instruction: Option<String>,
    most: [Option<usize>; 2],
}

impl Common {
    fn read(work: &Work, fields: &Fields<'_>) -> Result<Common, ApiError> {
        let pooled = Pooled::read(work, fields)?;
        unsupported::refuse(fields, &unsupported::SCORES)?;
        let description =
            "What makes a document relevant, for models whose prompt has a place for it (Qwen3-Reranker).";
        let instruction =
            fields.str("instruction", work.options.limits.max_text_bytes, description)?.map(str::to_string);
        let most = |name, what| Ok::<_, ApiError>(fields.count(name, (0, usize::MAX), what)?.filter(|most| *most > 0));
        let query = most("max_tokens_per_query", "Keep this many tokens of a query; 0 keeps all.")?;
        let document = most("max_tokens_per_doc", "Keep this many tokens of a document; 0 keeps all.")?;
        Ok(Common { pooled, instruction, most: [query, document] })
    }

    /// The requests for the scores of pairs of texts, of which each is the index of a query and of a document.
    fn plan(
        &self,
        work: &Work,
        (queries, documents): (&[String], &[String]),
        pairs: Vec<(usize, usize)>,
        names: [&str; 2],
    ) -> Result<(Plan, Cost), ApiError> {
        let least =
            |texts: &[String]| texts.iter().map(|text| work.tokenizer().least_tokens(text.len())).sum::<usize>();
        match &work.pooler().task {
            Task::Embed { .. } => {
                if self.instruction.is_some() {
                    return Err(ApiError::unsupported("instruction", "put it into the query: this model embeds texts"));
                }
                if self.most != [None, None] {
                    let advice = "use truncate_prompt_tokens: this model embeds texts";
                    return Err(ApiError::unsupported("max_tokens_per_doc", advice));
                }
                let count = queries.len() + documents.len();
                self.pooled.cost(work, count, least(queries) + least(documents)).check(&work.options.limits)?;
                let inputs = |texts: &[String]| texts.iter().cloned().map(Input::Text).collect();
                let mut prompts = self.pooled.prompts(work, inputs(queries), names[0])?;
                prompts.extend(self.pooled.prompts(work, inputs(documents), names[1])?);
                let (requests, cost) = self.pooled.requests(work, prompts)?;
                let places = pairs.into_iter().map(|(query, document)| (query, queries.len() + document)).collect();
                Ok((Plan { requests, cosines: Some(places) }, cost))
            }
            Task::Classify { labels, .. } if labels.len() == 1 => {
                let texts: Vec<(&str, &str)> =
                    pairs.iter().map(|(query, document)| (&*queries[*query], &*documents[*document])).collect();
                let bytes = texts.iter().map(|(a, b)| work.tokenizer().least_tokens(a.len() + b.len())).sum();
                self.pooled.cost(work, texts.len(), bytes).check(&work.options.limits)?;
                let of_pairs = (self.instruction.as_deref(), self.most);
                let prompts = self.pooled.pairs(work, &texts, of_pairs, names[1])?;
                let (requests, cost) = self.pooled.requests(work, prompts)?;
                Ok((Plan { requests, cosines: None }, cost))
            }
            Task::Classify { labels, .. } => {
                let advice = format!("it has {} labels, and a score needs one; use /classify", labels.len());
                Err(ApiError::unsupported("model", advice))
            }
        }
    }
}

/// Requests whose results give scores.
pub struct Plan {
    requests: Vec<GenerationRequest>,
    /// The two requests of each score that is a cosine; `None`: each request has a score.
    cosines: Option<Vec<(usize, usize)>>,
}

impl Plan {
    /// The token ids of each pair: of its prompt, or of its two prompts.
    pub fn token_ids(&self) -> Vec<Vec<u32>> {
        let of = |request: usize| &self.requests[request].prompt[..];
        match &self.cosines {
            Some(places) => places.iter().map(|(a, b)| [of(*a), of(*b)].concat()).collect(),
            None => (0..self.requests.len()).map(|request| of(request).to_vec()).collect(),
        }
    }

    /// Runs the requests and returns the scores, and the numbers of prompt tokens and of those that were cached.
    pub async fn scores(
        self,
        app: &Arc<App>,
        use_activation: Option<bool>,
    ) -> Result<(Vec<f32>, (usize, usize)), ApiError> {
        let Plan { requests, cosines } = self;
        let tokens = requests.iter().map(|request| request.prompt.len()).sum();
        let (vectors, cached) = Run::submit(app, requests).await?.collect_vectors().await?;
        let scores = match cosines {
            Some(places) => places.into_iter().map(|(a, b)| cosine(&vectors[a], &vectors[b])).collect(),
            None => {
                let score = |vector| finish(app.pooler(), vector, None, use_activation).first().copied().unwrap_or(0.0);
                vectors.into_iter().map(score).collect()
            }
        };
        Ok((scores, (tokens, cached)))
    }
}

/// The cosine of the angle between two vectors; 0 if one has no length.
fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let lengths = (product(a, a) * product(b, b)).sqrt();
    if lengths > 0.0 { (product(a, b) / lengths) as f32 } else { 0.0 }
}

/// `POST /score`.
pub async fn score(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let ((plan, pooled), _) = body.read(&app, prepare_score).await?;
    let envelope = Envelope::new(&app, pooled.adapter.as_deref(), "score", "list");
    let (scores, tokens) = plan.scores(&app, pooled.use_activation).await?;
    let one = |(index, score)| Score { index, object: "score", score };
    Ok(envelope.respond(scores.into_iter().enumerate().map(one), tokens))
}

#[derive(Serialize)]
struct Score {
    index: usize,
    object: &'static str,
    score: f32,
}

/// The fields of a request for scores.
pub struct ScoreRequest {
    common: Common,
    first: Vec<String>,
    second: Vec<String>,
}

/// Names of the documents of a ranking.
const DOCUMENTS: [&str; 2] = ["documents", "texts"];

const FIRST: [&str; 3] = ["queries", "text_1", "data_1"];
const SECOND: [&str; 4] = ["documents", "text_2", "data_2", "items"];

impl ScoreRequest {
    /// Reads the fields.
    pub fn read(work: &Work, fields: &Fields<'_>) -> Result<ScoreRequest, ApiError> {
        let common = Common::read(work, fields)?;
        unsupported::refuse(fields, &unsupported::PAIRS)?;
        let first = texts(work, fields, &FIRST, "A text, or one for each of the second texts.")?;
        let second = texts(work, fields, &SECOND, "The text or the texts that are scored with the first.")?;
        Ok(ScoreRequest { common, first, second })
    }
}

/// Reads the fields and tokenizes the texts.
pub fn prepare_score(work: &Work, fields: &Fields<'_>) -> Result<((Plan, Pooled), Cost), ApiError> {
    let ScoreRequest { common, first, second } = ScoreRequest::read(work, fields)?;
    let given = |names: &[&'static str]| names.iter().copied().find(|name| fields.raw(name).is_some());
    let names = [given(&FIRST).unwrap_or(FIRST[0]), given(&SECOND).unwrap_or(SECOND[0])];
    if first.len() != 1 && first.len() != second.len() {
        let expected = format!("one text, or as many as {}, {}", names[1], second.len());
        return Err(ApiError::wrong(names[0], &Value::from(first.len()), expected));
    }
    let pairs = (0..second.len()).map(|at| (if first.len() == 1 { 0 } else { at }, at)).collect();
    let (plan, cost) = common.plan(work, (&first, &second), pairs, names)?;
    Ok(((plan, common.pooled), cost))
}

/// `POST /rerank`.
pub async fn rerank(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let ((plan, ranking, pooled), _) = body.read(&app, prepare_rerank).await?;
    let id = response_id("rerank");
    let model = pooled.adapter.clone().unwrap_or_else(|| app.model.clone());
    let (scores, tokens) = plan.scores(&app, pooled.use_activation).await?;
    json::off_reactor(true, move || {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
        let Ranking { documents, top, returns_documents, is_bare } = ranking;
        order.truncate(top.unwrap_or(usize::MAX));
        if is_bare {
            let text = |index: usize| returns_documents.then(|| documents[index].as_str());
            let one = |index| BareRank { index, text: text(index), score: scores[index] };
            return json::response(&order.into_iter().map(one).collect::<Vec<BareRank<'_>>>());
        }
        let result = |index: &usize| Ranked {
            index: *index,
            document: returns_documents.then(|| json!({"text": documents[*index], "multi_modal": null})),
            relevance_score: scores[*index],
        };
        let results: Vec<Ranked> = order.iter().map(result).collect();
        let usage = prompt_usage(tokens);
        json::response(&Reranked { id, model, usage, results })
    })
    .await
}

#[derive(Serialize)]
struct Reranked {
    id: String,
    model: String,
    usage: Value,
    results: Vec<Ranked>,
}

#[derive(Serialize)]
struct Ranked {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<Value>,
    relevance_score: f32,
}

/// A document in the answer to a request with `texts`.
#[derive(Serialize)]
struct BareRank<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    score: f32,
}

/// What the response shows.
struct Ranking {
    documents: Vec<String>,
    top: Option<usize>,
    returns_documents: bool,
    /// The response is the list alone, as text-embeddings-inference and llama-server answer a request with `texts`.
    is_bare: bool,
}

/// The fields of a request for a ranking.
pub struct RerankRequest {
    common: Common,
    query: Vec<String>,
    ranking: Ranking,
}

impl RerankRequest {
    /// Reads the fields.
    pub fn read(work: &Work, fields: &Fields<'_>) -> Result<RerankRequest, ApiError> {
        let mut common = Common::read(work, fields)?;
        let query = texts(work, fields, &["query"], "The query, one text.")?;
        let description = "The documents; under the name texts the answer is the list of scores alone.";
        let documents = texts(work, fields, &DOCUMENTS, description)?;
        let is_bare = fields.raw(DOCUMENTS[1]).is_some();
        let top = fields.count("top_n", (0, usize::MAX), "Return this many documents, the best; 0 returns all.")?;
        let returns_documents = fields.flag("return_documents", true, "Also return the texts of the documents.")?;
        let returns_texts = fields.flag("return_text", false, "With texts: also return the texts.")?;
        let returns_documents = if is_bare { returns_texts } else { returns_documents };
        let description = "Return logits instead of scores: another name of use_activation: false.";
        if fields.flag("raw_scores", false, description)? {
            common.pooled.use_activation = Some(false);
        }
        let description = "With texts: cut what exceeds the context instead of refusing it.";
        let cuts = fields.flag("truncate", false, description)?;
        let description = "With truncate: which part is cut off.";
        let side = fields.word("truncation_direction", &["Right", "Left", "right", "left"], description)?;
        if cuts {
            common.pooled.cut_to_context(work, side.is_some_and(|side| side.eq_ignore_ascii_case("left")));
        }
        let ranking = Ranking { documents, top: top.filter(|top| *top > 0), returns_documents, is_bare };
        Ok(RerankRequest { common, query, ranking })
    }
}

fn prepare_rerank(work: &Work, fields: &Fields<'_>) -> Result<((Plan, Ranking, Pooled), Cost), ApiError> {
    let RerankRequest { common, query, ranking } = RerankRequest::read(work, fields)?;
    if query.len() != 1 {
        return Err(ApiError::found("query", &format!("{} texts", query.len()), "one text"));
    }
    let pairs = (0..ranking.documents.len()).map(|document| (0, document)).collect();
    let names = ["query", DOCUMENTS[usize::from(ranking.is_bare)]];
    let (plan, cost) = common.plan(work, (&query, &ranking.documents), pairs, names)?;
    let shown = if ranking.returns_documents { ranking.documents.iter().map(String::len).sum() } else { 0 };
    let cost = Cost { repeated_bytes: cost.repeated_bytes + 2 * shown, ..cost };
    cost.check(&work.options.limits)?;
    Ok(((plan, ranking, common.pooled), cost))
}
