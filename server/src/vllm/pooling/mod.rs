//! vLLM's routes of models that pool: `/pooling`, `/classify`, `/score`, `/rerank`.

pub mod score;
pub mod vectors;

use axum::routing::post;

use crate::openapi::{Operation, Routes, Schema};

/// Schemas of responses.
const SCHEMAS: &[Schema] = &[
    ("Pooled", "object", "What the model makes of each input."),
    ("Pooled.id", "string", "Unique id of the response."),
    ("Pooled.object", "string", "Always \"list\"."),
    ("Pooled.created", "integer", "Unix time in seconds."),
    ("Pooled.model", "string", "Name of the served model."),
    (
        "Pooled.data",
        "[any]",
        "One result per input: `index`, `object` and `data`, an embedding or the scores of labels.",
    ),
    ("Pooled.usage", "Usage", "Token counts."),
    ("Classified", "object", "The scores of the labels of each input."),
    ("Classified.id", "string", "Unique id of the response."),
    ("Classified.object", "string", "Always \"list\"."),
    ("Classified.created", "integer", "Unix time in seconds."),
    ("Classified.model", "string", "Name of the served model."),
    ("Classified.data", "[Classes]", "One result per input."),
    ("Classified.usage", "Usage", "Token counts."),
    ("Classes", "object", "The scores of the labels of an input."),
    ("Classes.index", "integer", "Index of the input."),
    ("Classes.label", "string", "The label with the greatest score."),
    ("Classes.probs", "[number]", "The scores of all labels, or their logits with use_activation: false."),
    ("Classes.num_classes", "integer", "Number of labels."),
    ("Scores", "object", "Scores of pairs of texts."),
    ("Scores.id", "string", "Unique id of the response."),
    ("Scores.object", "string", "Always \"list\"."),
    ("Scores.created", "integer", "Unix time in seconds."),
    ("Scores.model", "string", "Name of the served model."),
    ("Scores.data", "[Score]", "One score per pair."),
    ("Scores.usage", "Usage", "Token counts."),
    ("Score", "object", "The score of a pair of texts."),
    ("Score.index", "integer", "Index of the pair."),
    ("Score.object", "string", "Always \"score\"."),
    ("Score.score", "number", "The score."),
    ("Reranked", "object", "Documents in the order of their scores for a query."),
    ("Reranked.id", "string", "Unique id of the response."),
    ("Reranked.model", "string", "Name of the served model."),
    ("Reranked.usage", "Usage", "Token counts."),
    ("Reranked.results", "[Ranked]", "The best documents, best first."),
    ("Ranked", "object", "A document and its score."),
    ("Ranked.index", "integer", "Index of the document in the request."),
    ("Ranked.document", "any?", "The document's text, unless return_documents is false."),
    ("Ranked.relevance_score", "number", "Its score for the query."),
];

/// Adds the routes.
pub fn add(routes: &mut Routes) {
    routes.schemas(SCHEMAS);
    let request = routes.request("PoolingRequest", "Texts to pool.", vectors::PoolingRequest::read);
    let operation = Operation::post("Embed texts, or score their labels").reads(&request).returns("Pooled");
    routes.add(&["/pooling"], post(vectors::pooling), operation);
    let request = routes.request("ClassifyRequest", "Texts to classify.", vectors::ClassifyRequest::read);
    let operation = Operation::post("Score the labels of texts").reads(&request).returns("Classified");
    routes.add(&["/classify"], post(vectors::classify), operation);
    let request = routes.request("ScoreRequest", "Pairs of texts to score.", score::ScoreRequest::read);
    let operation = Operation::post("Score pairs of texts").reads(&request).returns("Scores");
    routes.add(&["/score", "/v1/score"], post(score::score), operation);
    let request = routes.request("RerankRequest", "A query and documents to rank.", score::RerankRequest::read);
    let operation = Operation::post("Rank documents by their scores for a query").reads(&request).returns("Reranked");
    routes.add(&["/rerank", "/v1/rerank", "/v2/rerank"], post(score::rerank), operation);
}
