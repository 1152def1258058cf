terraform {
  required_version = ">= 1.9"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.100"
    }
  }

  # Where the state is kept is yours to say, for example: terraform init -backend-config=backend.hcl
  # backend "s3" {}
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
