//! Rewrites a parsed template so that every expression that creates a text or container passes through [`CHARGE`].
//!
//! This uses parts of minijinja that have no stable interface, so its version is pinned. minijinja evaluates constant expressions
//! at compile time, before any budget applies; a charged operand is not constant.

use minijinja::machinery::ast::{self, BinOpKind, CallArg, Expr, Spanned, Stmt};
use minijinja::{Error, ErrorKind, Value};

use super::guard::{CHARGE, READ, READ_ALL, REMAINDER, REPEAT, STORE};

/// Filters that read the contents of all items.
const READS_ITEMS: [&str; 13] = [
    "dictsort",
    "groupby",
    "join",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "select",
    "selectattr",
    "sort",
    "sum",
    "unique",
];

/// A node in place of `old`.
fn at<T, U>(old: &Spanned<T>, node: U) -> Spanned<U> {
    Spanned::new(node, old.span())
}

/// Rewrites a statement. Fails if it imports or includes other templates, which a checkpoint does not have.
pub fn stmt<'a>(stmt: &Stmt<'a>) -> Result<Stmt<'a>, Error> {
    Ok(match stmt {
        Stmt::Template(it) => Stmt::Template(at(it, ast::Template { children: body(&it.children)? })),
        Stmt::EmitExpr(it) => {
            // A call here may be that of a recursive loop or a block; the formatter charges what it prints.
            let printed = match &it.expr {
                Expr::Call(it) => Expr::Call(call(it)),
                other => expr(other),
            };
            Stmt::EmitExpr(at(it, ast::EmitExpr { expr: printed }))
        }
        Stmt::EmitRaw(it) => {
            let text = Expr::Const(at(it, ast::Const { value: Value::from(it.raw) }));
            Stmt::EmitExpr(at(it, ast::EmitExpr { expr: text }))
        }
        Stmt::ForLoop(it) => {
            let new = ast::ForLoop {
                target: target(&it.target),
                iter: expr(&it.iter),
                filter_expr: it.filter_expr.as_ref().map(expr),
                recursive: it.recursive,
                body: body(&it.body)?,
                else_body: body(&it.else_body)?,
            };
            Stmt::ForLoop(at(it, new))
        }
        Stmt::IfCond(it) => {
            let (true_body, false_body) = (body(&it.true_body)?, body(&it.false_body)?);
            Stmt::IfCond(at(it, ast::IfCond { expr: expr(&it.expr), true_body, false_body }))
        }
        Stmt::WithBlock(it) => {
            let assignments = it.assignments.iter().map(|(name, value)| (target(name), expr(value))).collect();
            Stmt::WithBlock(at(it, ast::WithBlock { assignments, body: body(&it.body)? }))
        }
        Stmt::Set(it) => {
            let value = expr(&it.expr);
            let stored = if matches!(it.target, Expr::GetAttr(_)) { filtered(STORE, value) } else { value };
            Stmt::Set(at(it, ast::Set { target: target(&it.target), expr: stored }))
        }
        Stmt::SetBlock(it) => {
            let filter = it.filter.as_ref().map(expr);
            Stmt::SetBlock(at(it, ast::SetBlock { target: target(&it.target), filter, body: body(&it.body)? }))
        }
        Stmt::AutoEscape(it) => {
            Stmt::AutoEscape(at(it, ast::AutoEscape { enabled: expr(&it.enabled), body: body(&it.body)? }))
        }
        Stmt::FilterBlock(it) => {
            Stmt::FilterBlock(at(it, ast::FilterBlock { filter: expr(&it.filter), body: body(&it.body)? }))
        }
        Stmt::Block(it) => {
            Stmt::Block(at(it, ast::Block { name: it.name, required: it.required, body: body(&it.body)? }))
        }
        Stmt::Macro(it) => Stmt::Macro(macro_decl(it)?),
        Stmt::CallBlock(it) => {
            Stmt::CallBlock(at(it, ast::CallBlock { call: call(&it.call), macro_decl: macro_decl(&it.macro_decl)? }))
        }
        Stmt::Continue(it) => Stmt::Continue(at(it, ast::Continue)),
        Stmt::Break(it) => Stmt::Break(at(it, ast::Break)),
        Stmt::Do(it) => Stmt::Do(at(it, ast::Do { call: call(&it.call) })),
        Stmt::Import(_) | Stmt::FromImport(_) | Stmt::Extends(_) | Stmt::Include(_) => {
            return Err(Error::new(ErrorKind::InvalidOperation, "the template imports or includes another one"));
        }
    })
}

fn body<'a>(stmts: &[Stmt<'a>]) -> Result<Vec<Stmt<'a>>, Error> {
    stmts.iter().map(stmt).collect()
}

fn macro_decl<'a>(it: &Spanned<ast::Macro<'a>>) -> Result<Spanned<ast::Macro<'a>>, Error> {
    let new = ast::Macro {
        name: it.name,
        args: it.args.iter().map(target).collect(),
        defaults: it.defaults.iter().map(expr).collect(),
        body: body(&it.body)?,
    };
    Ok(at(it, new))
}

/// Rewrites the target of an assignment: a name, an attribute, or a list of targets.
fn target<'a>(to: &Expr<'a>) -> Expr<'a> {
    match to {
        Expr::List(it) => Expr::List(at(it, ast::List { items: it.items.iter().map(target).collect() })),
        other => expr(other),
    }
}

fn call<'a>(it: &Spanned<ast::Call<'a>>) -> Spanned<ast::Call<'a>> {
    at(it, ast::Call { expr: expr(&it.expr), args: args(&it.args) })
}

fn args<'a>(args: &[CallArg<'a>]) -> Vec<CallArg<'a>> {
    let arg = |arg: &CallArg<'a>| match arg {
        CallArg::Pos(it) => CallArg::Pos(expr(it)),
        CallArg::Kwarg(name, it) => CallArg::Kwarg(name, expr(it)),
        CallArg::PosSplat(it) => CallArg::PosSplat(charged(expr(it))),
        CallArg::KwargSplat(it) => CallArg::KwargSplat(charged(expr(it))),
    };
    args.iter().map(arg).collect()
}

fn expr<'a>(it: &Expr<'a>) -> Expr<'a> {
    let list = |items: &[Expr<'a>]| items.iter().map(expr).collect();
    match it {
        Expr::Var(it) => Expr::Var(at(it, ast::Var { id: it.id })),
        Expr::Const(it) => Expr::Const(at(it, ast::Const { value: it.value.clone() })),
        Expr::Slice(it) => {
            let [start, stop, step] = [&it.start, &it.stop, &it.step].map(|part| part.as_ref().map(expr));
            charged(Expr::Slice(at(it, ast::Slice { expr: expr(&it.expr), start, stop, step })))
        }
        Expr::UnaryOp(it) => {
            // The type is not `Copy`.
            let is_not = matches!(it.op, ast::UnaryOpKind::Not);
            let op = if is_not { ast::UnaryOpKind::Not } else { ast::UnaryOpKind::Neg };
            Expr::UnaryOp(at(it, ast::UnaryOp { op, expr: expr(&it.expr) }))
        }
        Expr::BinOp(it) => {
            let (op, left, right) = (it.op, expr(&it.left), expr(&it.right));
            match op {
                BinOpKind::Mul => {
                    let (left, right) = (filtered(REPEAT, left), filtered(REPEAT, right));
                    charged(Expr::BinOp(at(it, ast::BinOp { op, left, right })))
                }
                BinOpKind::Add | BinOpKind::Concat => {
                    charged(Expr::BinOp(at(it, ast::BinOp { op, left: charged(left), right })))
                }
                // Python formats a text with it.
                BinOpKind::Rem => {
                    let args = vec![CallArg::Pos(filtered(READ_ALL, right))];
                    charged(Expr::Filter(at(it, ast::Filter { name: REMAINDER, expr: Some(left), args })))
                }
                BinOpKind::ScAnd | BinOpKind::ScOr => Expr::BinOp(at(it, ast::BinOp { op, left, right })),
                _ => {
                    let (left, right) = (filtered(READ_ALL, left), filtered(READ_ALL, right));
                    Expr::BinOp(at(it, ast::BinOp { op, left, right }))
                }
            }
        }
        Expr::Compare(it) => {
            let compared = |operand| filtered(READ_ALL, expr(operand));
            let ops = it.ops.iter().map(|op| ast::CompareOp { op: op.op, expr: compared(&op.expr) }).collect();
            Expr::Compare(at(it, ast::Compare { expr: compared(&it.expr), ops }))
        }
        Expr::IfExpr(it) => {
            let (test_expr, true_expr) = (expr(&it.test_expr), expr(&it.true_expr));
            let false_expr = it.false_expr.as_ref().map(expr);
            Expr::IfExpr(at(it, ast::IfExpr { test_expr, true_expr, false_expr }))
        }
        Expr::Filter(it) => {
            // A filter without an expression applies to the block that follows it.
            let read = if READS_ITEMS.contains(&it.name) { READ_ALL } else { READ };
            let applied = it.expr.as_ref().map(|applied| filtered(read, expr(applied)));
            let new = ast::Filter { name: it.name, expr: applied, args: args(&it.args) };
            charged(Expr::Filter(at(it, new)))
        }
        Expr::Test(it) => {
            let read = if it.args.is_empty() { READ } else { READ_ALL };
            let tested = filtered(read, expr(&it.expr));
            let args = it.args.iter().map(|arg| match arg {
                CallArg::Pos(it) => CallArg::Pos(filtered(READ_ALL, expr(it))),
                other => args(std::slice::from_ref(other)).remove(0),
            });
            Expr::Test(at(it, ast::Test { name: it.name, expr: tested, args: args.collect() }))
        }
        Expr::GetAttr(it) => Expr::GetAttr(at(it, ast::GetAttr { expr: expr(&it.expr), name: it.name })),
        Expr::GetItem(it) => {
            let (expr, subscript_expr) = (filtered(READ, expr(&it.expr)), expr(&it.subscript_expr));
            Expr::GetItem(at(it, ast::GetItem { expr, subscript_expr }))
        }
        Expr::Call(it) => charged(Expr::Call(call(it))),
        Expr::List(it) => charged(Expr::List(at(it, ast::List { items: list(&it.items) }))),
        Expr::Map(it) => charged(Expr::Map(at(it, ast::Map { keys: list(&it.keys), values: list(&it.values) }))),
    }
}

fn charged(expr: Expr<'_>) -> Expr<'_> {
    filtered(CHARGE, expr)
}

fn filtered<'a>(name: &'a str, expr: Expr<'a>) -> Expr<'a> {
    let span = expr.span();
    Expr::Filter(Spanned::new(ast::Filter { name, expr: Some(expr), args: Vec::new() }, span))
}
