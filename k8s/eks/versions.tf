terraform {
  required_version = ">= 1.11"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.100"
    }
  }

  # Where the state is kept is yours to say: terraform init -backend-config=backend.hcl, made from backend.hcl.example. The lock is an object
  # beside the state, which S3 refuses to write twice; no table of DynamoDB is needed.
  backend "s3" {
    encrypt      = true
    use_lockfile = true
  }
}

provider "aws" {
  region = var.region

  default_tags {
    tags = {
      "project" = "serve-app"
      "cluster" = var.name
    }
  }
}
