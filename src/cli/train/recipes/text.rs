//! Language models: a small transformer that learns characters, and GPT-2 in mixed precision on bytes.

use std::path::Path;

use crate::data::{Dataset, text::Corpus, text::shakespeare};
use crate::recipes::{Parts, gpt2, lm};
use crate::{Error, Graph, Output, Result, Session};

use crate::cli::train::Lm;
use crate::cli::train::options::Kind;
use crate::cli::train::recipe::{Closing, Defaults, Recipe, RecipeData};

/// `kolo train lm`.
pub struct Characters {
    corpus: Corpus,
    size: lm::Size,
    prompt: String,
    n_sampled: usize,
    temperature: f32,
}

impl Characters {
    /// In the size of the flags.
    pub fn new(flags: &Lm) -> Result<Characters> {
        let corpus = corpus(flags.data.as_deref())?;
        let size = lm::Size {
            vocabulary: corpus.vocabulary().len(),
            context: flags.context.unwrap_or(64),
            width: flags.width.unwrap_or(128),
            layers: flags.layers.unwrap_or(4),
            heads: flags.heads.unwrap_or(4),
        };
        if size.heads == 0 || size.width == 0 || !size.width.is_multiple_of(size.heads) || size.context == 0 {
            return Err(Error::invalid_argument(format!(
                "--width {} must be a multiple of --heads {}, and --context at least 1",
                size.width, size.heads
            )));
        }
        // A prompt that cannot be written is better noticed now than after the training.
        if flags.sample > 0 && corpus.vocabulary().encode(&flags.prompt)?.is_empty() {
            return Err(Error::invalid_argument("--prompt is empty: give at least one character, or --sample 0"));
        }
        if !(flags.temperature >= 0.0 && flags.temperature.is_finite()) {
            return Err(Error::invalid_argument(format!("--temperature {} is not 0 or more", flags.temperature)));
        }
        let (n_sampled, temperature) = (flags.sample, flags.temperature);
        Ok(Characters { corpus, size, prompt: flags.prompt.clone(), n_sampled, temperature })
    }
}

fn corpus(data: Option<&Path>) -> Result<Corpus> {
    match data {
        Some(path) => Corpus::from_file(path),
        None => shakespeare(),
    }
}

fn token_inputs(graph: &Graph, context: usize) -> Vec<Output<'_>> {
    ["tokens", "next"].map(|name| graph.placeholder::<i32>(name, [None, Some(context)])).to_vec()
}

impl Recipe for Characters {
    fn defaults(&self) -> Defaults {
        Defaults { optimizer: (Kind::Adamw, 4e-3), batch: 32, epochs: 1, steps: Some(800) }
    }

    fn unit(&self) -> (&'static str, usize) {
        ("characters", self.size.context)
    }

    fn data(&self, _batch: usize, _seed: u64) -> Result<RecipeData> {
        let (train, test) = self.corpus.split(0.95)?;
        let context = self.size.context;
        let train = train.windows_every(context, (context / 4).max(1));
        Ok(RecipeData { train, test: Some(test.windows(context).batch(64, false)) })
    }

    fn inputs<'g>(&self, graph: &'g Graph) -> Vec<Output<'g>> {
        token_inputs(graph, self.size.context)
    }

    fn build<'g>(&self, inputs: &[Output<'g>]) -> Result<Parts<'g>> {
        Ok(lm::parts(lm::transformer(inputs[0], &self.size), inputs[1]))
    }

    fn closing<'g>(
        &'g self,
        graph: &'g Graph,
        inputs: &[Output<'g>],
        seed: u64,
    ) -> Result<Option<Box<dyn Closing + 'g>>> {
        if self.n_sampled == 0 {
            return Ok(None);
        }
        let tokens = inputs[0];
        let logits = graph.share_variables("sampling", || lm::transformer(tokens, &self.size));
        let sampler = lm::Sampler { tokens, logits, context: self.size.context };
        Ok(Some(Box::new(move |session: &Session| {
            let vocabulary = self.corpus.vocabulary();
            let text = sampler.write_on(session, vocabulary, &self.prompt, self.n_sampled, self.temperature, seed)?;
            Ok(format!("\n{}{text}", self.prompt))
        })))
    }
}

/// `kolo train lm --model gpt2-124m`.
pub struct Gpt2 {
    size: gpt2::Size,
    /// The text by bytes; absent for synthetic tokens.
    corpus: Option<Corpus>,
}

impl Gpt2 {
    /// In the size of the flags.
    pub fn new(flags: &Lm) -> Result<Gpt2> {
        let full = gpt2::Size::gpt2_124m();
        let size = gpt2::Size {
            vocabulary: flags.vocabulary,
            context: flags.context.unwrap_or(full.context),
            width: flags.width.unwrap_or(full.width),
            layers: flags.layers.unwrap_or(full.layers),
            heads: flags.heads.unwrap_or(full.heads),
            compute: flags.precision.dtype(),
        };
        size.check()?;
        if flags.data.as_deref() == Some(Path::new("synthetic")) {
            return Ok(Gpt2 { size, corpus: None });
        }
        let corpus = Corpus::bytes(&corpus(flags.data.as_deref())?.text())?;
        if size.vocabulary < corpus.vocabulary().len() {
            return Err(Error::invalid_argument(format!(
                "--vocabulary {} is too small: a text by bytes has {} tokens",
                size.vocabulary,
                corpus.vocabulary().len()
            )));
        }
        Ok(Gpt2 { size, corpus: Some(corpus) })
    }
}

impl Recipe for Gpt2 {
    fn defaults(&self) -> Defaults {
        Defaults { optimizer: (Kind::Adamw, 6e-4), batch: 16, epochs: 1, steps: Some(200) }
    }

    fn unit(&self) -> (&'static str, usize) {
        ("tokens", self.size.context)
    }

    fn data(&self, batch: usize, seed: u64) -> Result<RecipeData> {
        let context = self.size.context;
        let Some(corpus) = &self.corpus else {
            return Ok(RecipeData { train: self.synthetic(batch, seed)?, test: None });
        };
        let (train, test) = corpus.split(0.98)?;
        let train = train.windows_every(context, (context / 4).max(1));
        Ok(RecipeData { train, test: Some(test.windows(context).batch(batch, false)) })
    }

    fn inputs<'g>(&self, graph: &'g Graph) -> Vec<Output<'g>> {
        token_inputs(graph, self.size.context)
    }

    fn build<'g>(&self, inputs: &[Output<'g>]) -> Result<Parts<'g>> {
        Ok(gpt2::parts(gpt2::logits(inputs[0], &self.size), inputs[1]))
    }
}

impl Gpt2 {
    fn synthetic(&self, batch: usize, seed: u64) -> Result<Dataset> {
        let tokens = batch.checked_mul(64).and_then(|n| n.checked_mul(self.size.context)).filter(|&n| n < 1 << 30);
        let tokens = tokens.ok_or_else(|| Error::invalid_argument("--batch-size and --context are too large"))?;
        gpt2::synthetic(tokens + 1, &self.size, seed)
    }
}
