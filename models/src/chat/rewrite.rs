//! A parsed template with what makes texts and containers put through [`CHARGE`]; the rest stays as it is.
//!
//! It stands on the parts of minijinja that have no stable interface, so the version is pinned. The compiler computes constant
//! expressions before any rendering; a charged operand is no constant.

use minijinja::machinery::ast::{self, BinOpKind, CallArg, Expr, Spanned, Stmt};
use minijinja::{Error, ErrorKind, Value};

use super::guard::{CHARGE, STORE};

/// The template that is rendered instead of `stmt`.
///
/// # Errors
/// When the template wants other templates, which a checkpoint does not have.
pub fn stmt<'a>(stmt: &Stmt<'a>) -> Result<Stmt<'a>, Error> {
    Ok(match stmt {
        Stmt::Template(it) => Stmt::Template(Spanned::new(ast::Template { children: body(&it.children)? }, it.span())),
        Stmt::EmitExpr(it) => {
            // A call here may be a loop's own or a block's; the formatter charges what it prints.
            let printed = match &it.expr {
                Expr::Call(call) => Expr::Call(called(call)),
                other => expr(other),
            };
            Stmt::EmitExpr(Spanned::new(ast::EmitExpr { expr: printed }, it.span()))
        }
        Stmt::EmitRaw(it) => {
            let text = Expr::Const(Spanned::new(ast::Const { value: Value::from(it.raw) }, it.span()));
            Stmt::EmitExpr(Spanned::new(ast::EmitExpr { expr: text }, it.span()))
        }
        Stmt::ForLoop(it) => {
            let changed = ast::ForLoop {
                target: target(&it.target),
                iter: expr(&it.iter),
                filter_expr: it.filter_expr.as_ref().map(expr),
                recursive: it.recursive,
                body: body(&it.body)?,
                else_body: body(&it.else_body)?,
            };
            Stmt::ForLoop(Spanned::new(changed, it.span()))
        }
        Stmt::IfCond(it) => {
            let (true_body, false_body) = (body(&it.true_body)?, body(&it.false_body)?);
            Stmt::IfCond(Spanned::new(ast::IfCond { expr: expr(&it.expr), true_body, false_body }, it.span()))
        }
        Stmt::WithBlock(it) => {
            let assignments = it.assignments.iter().map(|(name, value)| (target(name), expr(value))).collect();
            Stmt::WithBlock(Spanned::new(ast::WithBlock { assignments, body: body(&it.body)? }, it.span()))
        }
        Stmt::Set(it) => {
            let value = expr(&it.expr);
            let stored = if matches!(it.target, Expr::GetAttr(_)) { through(STORE, value) } else { value };
            Stmt::Set(Spanned::new(ast::Set { target: target(&it.target), expr: stored }, it.span()))
        }
        Stmt::SetBlock(it) => {
            let filter = it.filter.as_ref().map(expr);
            Stmt::SetBlock(Spanned::new(
                ast::SetBlock { target: target(&it.target), filter, body: body(&it.body)? },
                it.span(),
            ))
        }
        Stmt::AutoEscape(it) => Stmt::AutoEscape(Spanned::new(
            ast::AutoEscape { enabled: expr(&it.enabled), body: body(&it.body)? },
            it.span(),
        )),
        Stmt::FilterBlock(it) => Stmt::FilterBlock(Spanned::new(
            ast::FilterBlock { filter: expr(&it.filter), body: body(&it.body)? },
            it.span(),
        )),
        Stmt::Block(it) => Stmt::Block(Spanned::new(
            ast::Block { name: it.name, required: it.required, body: body(&it.body)? },
            it.span(),
        )),
        Stmt::Macro(it) => Stmt::Macro(declared(it)?),
        Stmt::CallBlock(it) => {
            let changed = ast::CallBlock { call: called(&it.call), macro_decl: declared(&it.macro_decl)? };
            Stmt::CallBlock(Spanned::new(changed, it.span()))
        }
        Stmt::Continue(it) => Stmt::Continue(Spanned::new(ast::Continue, it.span())),
        Stmt::Break(it) => Stmt::Break(Spanned::new(ast::Break, it.span())),
        Stmt::Do(it) => Stmt::Do(Spanned::new(ast::Do { call: called(&it.call) }, it.span())),
        Stmt::Import(_) | Stmt::FromImport(_) | Stmt::Extends(_) | Stmt::Include(_) => {
            return Err(Error::new(ErrorKind::InvalidOperation, "the template imports or includes another one"));
        }
    })
}

fn body<'a>(stmts: &[Stmt<'a>]) -> Result<Vec<Stmt<'a>>, Error> {
    stmts.iter().map(stmt).collect()
}

fn declared<'a>(it: &Spanned<ast::Macro<'a>>) -> Result<Spanned<ast::Macro<'a>>, Error> {
    let changed = ast::Macro {
        name: it.name,
        args: it.args.iter().map(target).collect(),
        defaults: it.defaults.iter().map(expr).collect(),
        body: body(&it.body)?,
    };
    Ok(Spanned::new(changed, it.span()))
}

/// What is assigned to: names, lists of them, and attributes.
fn target<'a>(to: &Expr<'a>) -> Expr<'a> {
    match to {
        Expr::List(it) => {
            Expr::List(Spanned::new(ast::List { items: it.items.iter().map(target).collect() }, it.span()))
        }
        other => expr(other),
    }
}

fn called<'a>(it: &Spanned<ast::Call<'a>>) -> Spanned<ast::Call<'a>> {
    Spanned::new(ast::Call { expr: expr(&it.expr), args: args(&it.args) }, it.span())
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
        Expr::Var(it) => Expr::Var(Spanned::new(ast::Var { id: it.id }, it.span())),
        Expr::Const(it) => Expr::Const(Spanned::new(ast::Const { value: it.value.clone() }, it.span())),
        Expr::Slice(it) => {
            let [start, stop, step] = [&it.start, &it.stop, &it.step].map(|part| part.as_ref().map(expr));
            charged(Expr::Slice(Spanned::new(ast::Slice { expr: expr(&it.expr), start, stop, step }, it.span())))
        }
        Expr::UnaryOp(it) => {
            // The type cannot be copied.
            let is_not = matches!(it.op, ast::UnaryOpKind::Not);
            let op = if is_not { ast::UnaryOpKind::Not } else { ast::UnaryOpKind::Neg };
            Expr::UnaryOp(Spanned::new(ast::UnaryOp { op, expr: expr(&it.expr) }, it.span()))
        }
        Expr::BinOp(it) => {
            let (op, left, right) = (it.op, expr(&it.left), expr(&it.right));
            let grows = matches!(op, BinOpKind::Add | BinOpKind::Mul | BinOpKind::Concat);
            let left = if grows { charged(left) } else { left };
            let whole = Expr::BinOp(Spanned::new(ast::BinOp { op, left, right }, it.span()));
            if grows { charged(whole) } else { whole }
        }
        Expr::Compare(it) => {
            let ops = it.ops.iter().map(|op| ast::CompareOp { op: op.op, expr: expr(&op.expr) }).collect();
            Expr::Compare(Spanned::new(ast::Compare { expr: expr(&it.expr), ops }, it.span()))
        }
        Expr::IfExpr(it) => {
            let (test_expr, true_expr) = (expr(&it.test_expr), expr(&it.true_expr));
            let false_expr = it.false_expr.as_ref().map(expr);
            Expr::IfExpr(Spanned::new(ast::IfExpr { test_expr, true_expr, false_expr }, it.span()))
        }
        Expr::Filter(it) => {
            // Without an expression it applies to the block that it stands before.
            let changed = ast::Filter { name: it.name, expr: it.expr.as_ref().map(expr), args: args(&it.args) };
            charged(Expr::Filter(Spanned::new(changed, it.span())))
        }
        Expr::Test(it) => {
            let changed = ast::Test { name: it.name, expr: expr(&it.expr), args: args(&it.args) };
            Expr::Test(Spanned::new(changed, it.span()))
        }
        Expr::GetAttr(it) => {
            Expr::GetAttr(Spanned::new(ast::GetAttr { expr: expr(&it.expr), name: it.name }, it.span()))
        }
        Expr::GetItem(it) => {
            let (expr, subscript_expr) = (expr(&it.expr), expr(&it.subscript_expr));
            Expr::GetItem(Spanned::new(ast::GetItem { expr, subscript_expr }, it.span()))
        }
        Expr::Call(it) => charged(Expr::Call(called(it))),
        Expr::List(it) => charged(Expr::List(Spanned::new(ast::List { items: list(&it.items) }, it.span()))),
        Expr::Map(it) => {
            let changed = ast::Map { keys: list(&it.keys), values: list(&it.values) };
            charged(Expr::Map(Spanned::new(changed, it.span())))
        }
    }
}

/// The same value, charged.
fn charged(expr: Expr<'_>) -> Expr<'_> {
    through(CHARGE, expr)
}

fn through<'a>(name: &'a str, expr: Expr<'a>) -> Expr<'a> {
    let span = expr.span();
    Expr::Filter(Spanned::new(ast::Filter { name, expr: Some(expr), args: Vec::new() }, span))
}
