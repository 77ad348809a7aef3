from __future__ import annotations

import pytest

from hpctrain.run.source_folder import secret_folder, secret_part

SECRET = """.env a/.env prod.env .ENV .env.local .envrc .netrc .pgpass .my.cnf .git-credentials .npmrc .pypirc
    .dockercfg .docker/config.json deploy/.docker/config.json kubeconfig kubeconfig-prod.yaml gcp-service-account.json
    my_service_account_2.json gcp-credentials.json credentials application_default_credentials.json client_secret_1.json
    hf_token .hf_token hf_token.txt huggingface/token token secrets.yaml conf/Secrets.toml secret.json tls.pem tls.key
    id_rsa id_ed25519 id_ecdsa_sk cert.p12 app.keystore db.kdbx prod.tfvars terraform.tfstate kaggle.json
    wandb_api_key.txt .bash_history .vault-token .htpasswd user.keytab"""
FOLDERS = {".aws/config": ".aws", "a/.kube/config": "a/.kube", ".config/gcloud/x/y": ".config/gcloud", ".ssh": ".ssh"}
PLAIN = """train.py secrets.py token.py api_keys.py credentials.md .env.example .env.template secrets.example.yaml
    tokenizer.json tokens.json special_tokens_map.json id_map.json environment.yml conf/env/x.yaml config.json
    secretary.txt keys.yaml .gitignore .github/workflows/test.yml token/vocab.txt x.aws/config my.kube/config"""


@pytest.mark.parametrize("path", SECRET.split())
def test_names_of_secrets(path):
    assert secret_part(path) == path


@pytest.mark.parametrize(("path", "folder"), FOLDERS.items())
def test_folders_of_secrets(path, folder):
    assert secret_part(path) == secret_folder(path) == folder


@pytest.mark.parametrize("path", PLAIN.split())
def test_code_samples_and_other_names(path):
    assert secret_part(path) == ""
